"""Training checkpoints of processes that die: killed while saving, or with a full disk."""

import os
import resource
import signal
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ernie_jax.checkpoint import TrainCheckpointer

_SIZE = 1 << 20

# Step n holds n everywhere; each save is announced once it has been handed over, whether it is written yet or not.
_SAVER = f"""
import sys
import jax.numpy as jnp
from ernie_jax.checkpoint import TrainCheckpointer
checkpointer = TrainCheckpointer(sys.argv[1], keep=100)
step = checkpointer.latest_valid_step() or 0
while True:
    step += 1
    state = {{f"w{{i}}": jnp.full({_SIZE}, step, jnp.float32) for i in range(4)}}
    checkpointer.save(step, state, {{"step": step}})
    print(step, flush=True)
"""


def _start(code, *args):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    return subprocess.Popen([sys.executable, "-c", code, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)


def test_killed_while_saving_resumes_from_the_last_whole_step(tmp_path):
    last = 0
    for delay in (0.0, 0.01):
        with _start(_SAVER, str(tmp_path)) as process:
            for announced in process.stdout:
                if int(announced) >= last + 3:
                    break
            else:
                pytest.fail(process.stderr.read().decode())
            time.sleep(delay)  # another moment of the write
            process.send_signal(signal.SIGKILL)
        with TrainCheckpointer(tmp_path, read_only=True) as checkpointer:
            found = checkpointer.latest_valid_step()
            # The save before the announced one was finished before the announced one began.
            assert found is not None and found >= int(announced) - 1
            abstract = {f"w{i}": jax.ShapeDtypeStruct((_SIZE,), jnp.float32) for i in range(4)}
            state, extra = checkpointer.restore(found, abstract)
        assert extra == {"step": found}
        for leaf in state.values():
            np.testing.assert_array_equal(leaf, float(found))
        last = found


_FULL_DISK = textwrap.dedent("""
    import resource, signal, sys
    import jax.numpy as jnp
    from ernie_jax.checkpoint import CheckpointWriteError, TrainCheckpointer
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    checkpointer = TrainCheckpointer(sys.argv[1], keep=1)
    checkpointer.save(1, {"w": jnp.zeros(1000)}, {})
    checkpointer.wait()
    # A limit on the size of a file fails a write just as a full disk does.
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    import numpy as np
    noise = {"w": jnp.asarray(np.random.default_rng(0).normal(size=1 << 20), jnp.float32)}
    try:
        checkpointer.save(2, noise, {})
        checkpointer.save(3, noise, {})
    except CheckpointWriteError as error:
        print("reported:", error, flush=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    print("valid:", checkpointer.latest_valid_step(), flush=True)
    print("again:", checkpointer.save(2, noise, {}), flush=True)
    checkpointer.close()
    print("steps:", checkpointer.steps(), flush=True)
""")


def test_full_disk_is_reported_by_the_next_save(tmp_path):
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    with _start(_FULL_DISK, str(tmp_path)) as process:
        out, err = (text.decode() for text in process.communicate(timeout=120))
    assert "reported: checkpoint of step 2" in out, out + err
    assert "the newest whole one is step 1" in out
    assert "valid: 1" in out
    assert "again: True\nsteps: (2,)" in out, out + err
