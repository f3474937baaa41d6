"""`launch/bench.py remat` as a user runs it, on a small text model: what it keeps and computes again is what was predicted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

SCRIPT = Path(__file__).parents[2] / "launch" / "bench.py"
COMMAND = ("remat",)
SIZES = "--hidden 32 --layers 4 --heads 4 --head-dim 8 --dense-width 48 --experts 4 --experts-per-token 2 --width 16 --vocab 64"


def test_bytes_and_flops_agree_with_the_prediction():
    # The tests' own devices, flags and kept programs, which a process of its own has from its environment.
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir}
    arguments = [*SIZES.split(), "--batch-size", "4", "--tokens", "64", "--model", "text", "--policy", "attention", "--json"]
    command = [sys.executable, SCRIPT, "remat", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=env)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    attention, full = result["models"]["text"]
    assert (attention["policy"], full["policy"]) == ("attention", "full")
    assert attention["layer_bytes"] == pytest.approx(attention["predicted_layer_bytes"], rel=0.02) and full["layer_bytes"] == 0
    assert full["saved_bytes"] > 0 == attention["saved_bytes"]
    # Beyond those of `attention`, the least here.
    assert full["extra_flops"] == pytest.approx(full["predicted_extra_flops"] - attention["predicted_extra_flops"], rel=1e-6)
    assert {"hardware", "versions", "commit", "command", "options"} <= set(result)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy", "experts=half"], "expected none, full, offload"),
        (["--policy", "offload"], "offloading is not for CPU"),
        (["--tokens", "1"], "--tokens must be at least 2"),
        (["--layers", "2"], "--layers must be at least 3"),
        (["--mesh", "pipeline:2"], "expected axis=size"),
    ],
)
def test_what_cannot_be_measured_is_refused(refused, arguments, said):
    assert said in refused(*arguments)
