"""Predicted memory of steps against what the compiler said of them.

`golden_memory.json` holds arguments, temporaries and outputs of a device as `memory_analysis` gave them on eight fake CPU devices
(jax 0.10.2), outputs in arguments' place left out. Compiling them all takes half an hour; `test_proof` compiles one anew.
"""

import importlib.util
import json
import math
import time
from pathlib import Path

import jax
import pytest

from ernie_jax.config import default_config, run_config_from
from ernie_jax.plan.abstract_layout import abstract_layout
from ernie_jax.plan.memory import CATEGORIES, predict_memory
from ernie_jax.train.state import abstract_state

_SPEC = importlib.util.spec_from_file_location("compiled_collectives", Path(__file__).with_name("compiled_collectives.py"))
assert _SPEC and _SPEC.loader
_COMPILED = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_COMPILED)
run_of = _COMPILED.run_of
GOLDEN = json.loads(Path(__file__).with_name("golden_memory.json").read_text())


@pytest.mark.parametrize("entry", GOLDEN, ids=lambda entry: entry["name"])
def test_a_step_needs_what_the_compiler_says(entry):
    assert predict_memory(run_of(entry["overrides"]), "cpu").bytes == pytest.approx(entry["bytes"], rel=0.1)


def test_the_recorded_steps_are_of_every_kind():
    runs = [run_of(entry["overrides"]) for entry in GOLDEN]
    assert len(runs) >= 24
    assert {run.remat for run in runs} >= {"none", "full", "experts", "attention"}
    assert {run.mesh.zero for run in runs} == {0, 1, 3}
    assert {run.pipeline.schedule for run in runs if run.mesh.pipeline > 1} == {"gpipe", "1f1b", "interleaved"}
    assert all(max(getattr(run.mesh, axis) for run in runs) > 1 for axis in ("data", "tensor", "pipeline", "expert"))


# GiB of a device, compiled for 512 fake CPU devices by jax 0.10.2.
LARGE = [
    ("ernie-4.5-300b-a47b", {}, 41.77),
    ("ernie-4.5-vl-424b-a47b", {"max_patches": 256}, 55.78),
]


def large_run(name, data):
    config = default_config()
    config.model.preset, config.data.kind = name, "standard_library"
    config.data.update(data)
    config.seq_len, config.batch_size, config.dtype, config.remat = 4096, 512, "bfloat16", "full"
    config.mesh.update({"tensor": 8, "pipeline": 8, "expert": 8, "zero": 1})
    config.pipeline.microbatches = 16
    config.moe.update({"capacity_factor": 1.5, "balance_scope": "microbatch"})
    return run_config_from(config)


@pytest.mark.parametrize(("name", "data", "gib"), LARGE, ids=lambda value: value if isinstance(value, str) else "")
def test_published_models_on_512_devices_within_15_percent(name, data, gib):
    predicted = predict_memory(large_run(name, data), "cpu")
    assert predicted.bytes / 2**30 == pytest.approx(gib, rel=0.15)
    # Where 16-bit products need no float32 copies it is less, and then it fits a card.
    assert predict_memory(large_run(name, data), "gpu").bytes < 0.9 * predicted.bytes


def test_arguments_are_counted_exactly():
    run = large_run("ernie-4.5-300b-a47b", {})
    state = abstract_state(run, abstract_layout(run))
    exact = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state))
    parts = predict_memory(run).fullest.parts
    assert tuple(parts) == CATEGORIES
    assert parts["parameters"] + parts["optimizer"] == pytest.approx(exact, rel=1e-3)
    # Four arrays of int32 over eight batch shards, as given and as microbatches.
    assert parts["batch"] == 2 * 4 * 4 * 512 * 4096 / 8


def test_a_search_can_ask_often():
    run = large_run("ernie-4.5-300b-a47b", {})
    predict_memory(run)
    start = time.process_time()
    for _ in range(20):
        predict_memory(run)
    # A few milliseconds each; fifty leave room for a machine that is busy.
    assert time.process_time() - start < 20 * 0.05
