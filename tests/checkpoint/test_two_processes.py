"""Two real processes that share a mesh: each loads its part, process 0 writes all; training state saved and restored."""

import os
import socket
import subprocess
import sys

from safetensors.numpy import load_file

_WORKER = """
import sys
import jax
import numpy as np
import jax.numpy as jnp
from ernie_jax.sharding import initialize_hosts, make_mesh

initialize_hosts()
from ernie_jax.checkpoint import TrainCheckpointer, load_pretrained, save_pretrained

golden, out = sys.argv[1:3]
mesh = make_mesh(expert=4, tensor=2)
model = load_pretrained(golden, mesh=mesh)
# Half of the experts are of another process.
assert len(model.decoder.segments[1].layers[0].moe.experts.down.get_value().addressable_shards) == 4
save_pretrained(model, out, max_shard_size=200_000)

sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("expert"))
values = np.arange(32.0, dtype=np.float32).reshape(8, 4)
state = {"w": jax.make_array_from_callback((8, 4), sharding, lambda index: values[index])}
with TrainCheckpointer(out + "_state") as checkpointer:
    checkpointer.save(1, state, {"who": jax.process_index()})
    checkpointer.save(2, state, {"who": jax.process_index()})
    checkpointer.wait()
    assert checkpointer.latest_valid_step() == 2
    other = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "tensor"))
    got, extra = checkpointer.restore(2, {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=other)})
    assert extra == {"who": 0}
    for shard in got["w"].addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), values[shard.index])
print("ok")
"""


def _free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def test_two_processes(golden, tmp_path, read_folder, assert_same_bits):
    address = f"localhost:{_free_port()}"
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    workers = []
    for index in range(2):
        who = {"ERNIE_COORDINATOR": address, "ERNIE_NUM_PROCESSES": "2", "ERNIE_PROCESS_ID": str(index)}
        command = [sys.executable, "-c", _WORKER, str(golden / "moe"), str(tmp_path / "out")]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        workers.append(subprocess.Popen(command, env=os.environ | flags | who, **pipes))
    try:
        for worker in workers:
            out, _ = worker.communicate(timeout=180)
            assert worker.returncode == 0, out
    finally:
        for worker in workers:
            worker.kill()
    assert_same_bits(read_folder(tmp_path / "out"), load_file(golden / "moe" / "model.safetensors"))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
