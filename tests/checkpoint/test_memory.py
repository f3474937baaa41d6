"""Host memory of import and export: a process of its own, its peak against what the devices keep and the largest file."""

import json
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from ernie_jax.checkpoint.hub_tensors import hub_tensors
from ernie_jax.config import ModelConfig, MoEConfig, config_to_hf
from ernie_jax.models import abstract_model
from ernie_jax.sharding import variables_by_path

MB = 1 << 20

# One process: peak resident memory over the time before, for a load and for an export of what was loaded.
# A first small model brings the libraries in.
_MEASURE = """
import json, sys, threading
from pathlib import Path
from flax import nnx
import jax
from ernie_jax.checkpoint import load_pretrained, save_pretrained
from ernie_jax.sharding import make_mesh

def resident():
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024

def peak_of(work):
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = resident()
    result = work()
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return result, int(fields["VmHWM"].split()[0]) * 1024 - before

small, large, out, sizes = sys.argv[1:5]
mesh = make_mesh(**json.loads(sizes)) if sizes != "{}" else None
save_pretrained(load_pretrained(small, mesh=mesh, dtype="bfloat16"), out + "_small")
model, load = peak_of(lambda: load_pretrained(large, mesh=mesh, dtype="bfloat16"))
arrays = [v.get_value() for v in jax.tree.leaves(nnx.state(model), is_leaf=lambda x: isinstance(x, nnx.Variable))]
kept = sum(s.data.nbytes for a in arrays for s in a.addressable_shards)
_, export = peak_of(lambda: save_pretrained(model, out, max_shard_size="24MB"))
print(json.dumps({"kept": kept, "load": load, "export": export}))
"""


def _config(width, layers):
    moe = MoEConfig(num_experts=8, num_experts_per_tok=2, intermediate_size=width, num_shared_experts=1, layer_start=1)
    return ModelConfig(
        vocab_size=4096,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        moe=moe,
    )


def _write(folder, config, file_bytes):
    """A checkpoint of random weights, in files of about `file_bytes`."""
    variables = variables_by_path(nnx.state(abstract_model(config)))
    tensors = hub_tensors(config, {path: v.shape for path, v in variables.items()})
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_to_hf(config)))
    rng, parts, size = np.random.default_rng(0), [{}], 0
    for name, tensor in tensors.items():
        dtype = np.float32 if tensor.float32 else ml_dtypes.bfloat16
        values = rng.normal(size=tensor.shape).astype(np.float32).astype(dtype)
        if parts[-1] and size + values.nbytes > file_bytes:
            parts.append({})
            size = 0
        parts[-1][name] = values
        size += values.nbytes
    mapping = {}
    for i, part in enumerate(parts):
        file = f"model-{i + 1:05}-of-{len(parts):05}.safetensors"
        save_file(part, folder / file, {"format": "pt"})
        mapping |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": mapping}))
    return max(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the high-water mark is read from Linux's /proc")
@pytest.mark.parametrize("sizes", [{}, {"tensor": 2, "expert": 2}])
def test_peak_memory(tmp_path, sizes):
    _write(tmp_path / "small", _config(64, 2), 1 * MB)
    largest = _write(tmp_path / "large", _config(512, 6), 24 * MB)
    environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={4 if sizes else 1}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", _MEASURE, str(tmp_path / "small"), str(tmp_path / "large"), str(tmp_path / "out")]
    done = subprocess.run([*command, json.dumps(sizes)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = {name: value / MB for name, value in json.loads(done.stdout.splitlines()[-1]).items()}
    bound = 1.3 * largest / MB
    assert figures["kept"] > 70
    assert figures["load"] < figures["kept"] + bound, figures
    assert figures["export"] < bound, figures
