"""Tiny runs for the training tests."""

import jax
import numpy as np
import pytest

from ernie_jax.config.run import (
    CheckpointConfig,
    DataConfig,
    MeshConfig,
    MoETrainConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
)
from ernie_jax.sharding import make_mesh
from ernie_jax.testing import random_batch, tiny_moe
from ernie_jax.train.state import init_state, run_layout, state_shardings

_SECTIONS = {
    "moe": MoETrainConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "mesh": MeshConfig,
    "checkpoint": CheckpointConfig,
}


@pytest.fixture(scope="session")
def tiny_run():
    """`tiny_run(model=..., moe={...}, accumulate=..., ...)`: a run whose sections are given as dictionaries."""

    def make(*, model=None, **changes):
        sections = {key: cls(**changes.pop(key, {})) for key, cls in _SECTIONS.items()}
        defaults = {"steps": 100, "batch_size": 8, "seq_len": 12, "data": DataConfig(kind="standard_library")}
        return RunConfig(**defaults | {"model": model or tiny_moe(num_experts_per_tok=2), **sections} | changes)

    return make


@pytest.fixture(scope="session")
def layout_of():
    """`layout_of(run, data=2, ...)`: a layout over as many of the devices as the sizes ask for."""

    def make(run, **sizes):
        count = int(np.prod(list(sizes.values()) or [1]))
        return run_layout(run, make_mesh(**sizes, devices=jax.devices()[:count]))

    return make


@pytest.fixture(scope="session")
def fresh_state(layout_of):
    """`fresh_state(run, layout)`: a state as `init_state` makes it; compiled once a model, then placed."""
    known = {}

    def make(run, layout):
        key = (run.model, run.mtp_blocks, run.seed, run.moe.freeze_gate, bool(run.moe.placement_every), run.optimizer)
        if key not in known:
            known[key] = jax.device_get(init_state(run, layout_of(run)))
        return jax.device_put(known[key], state_shardings(run, layout))

    return make


@pytest.fixture(scope="session")
def batch_of():
    """`batch_of(run, seed)`: padding and two documents in a row, so microbatches score different numbers of tokens."""
    return lambda run, seed=0: random_batch(run.model, run.batch_size, run.seq_len, seed)


@pytest.fixture(scope="session")
def assert_close():
    def check(got, want, rtol=1e-5, atol=1e-6):
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))

    return check
