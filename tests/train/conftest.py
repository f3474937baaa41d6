"""Tiny runs for the training tests. B batch, T tokens."""

import dataclasses

import jax
import numpy as np
import pytest

from ernie_jax.config.model import ModelConfig, MoEConfig
from ernie_jax.config.run import DataConfig, MoETrainConfig, OptimizerConfig, RunConfig, ScheduleConfig
from ernie_jax.sharding import make_mesh
from ernie_jax.train.state import init_state, run_layout, state_shardings

VOCAB = 64
_RUN_SECTIONS = {"moe": MoETrainConfig, "optimizer": OptimizerConfig, "schedule": ScheduleConfig}


def _tiny_model(**changes):
    moe = MoEConfig(num_experts=8, num_experts_per_tok=2, intermediate_size=16, num_shared_experts=1, layer_start=1)
    model = ModelConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        # Far from the published 0.02, so that routers and losses are not near-ties.
        initializer_range=0.2,
        moe=moe,
    )
    return dataclasses.replace(model, **changes)


def _tiny_run(*, model=None, **changes):
    sections = {key: cls(**changes.pop(key, {})) for key, cls in _RUN_SECTIONS.items()}
    defaults = {"steps": 100, "batch_size": 16, "seq_len": 16, "data": DataConfig(kind="standard_library")}
    return RunConfig(**defaults | {"model": model or _tiny_model(), **sections} | changes)


def _batch(rows=16, tokens=16, seed=0):
    """Two packed documents a row, padding of random length behind them, a third of the tokens not scored."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, VOCAB, (rows, tokens))
    position = np.arange(tokens)
    first, length = rng.integers(1, tokens // 2, (rows, 1)), rng.integers(tokens // 2, tokens + 1, (rows, 1))
    segments = np.where(position < length, 1 + (position >= first), 0)
    labels = np.where(rng.random((rows, tokens)) < 0.67, np.roll(ids, -1, 1), -100)
    labels = np.where((segments == 0) | (segments != np.roll(segments, -1, 1)), -100, labels)
    positions = np.where(position >= first, position - first, position)
    arrays = {"input_ids": ids, "labels": labels, "segment_ids": segments, "position_ids": positions}
    return {name: np.broadcast_to(a, (rows, tokens)).astype(np.int32) for name, a in arrays.items()}


@pytest.fixture(scope="session")
def tiny_model():
    return _tiny_model


@pytest.fixture(scope="session")
def tiny_run():
    return _tiny_run


@pytest.fixture(scope="session")
def make_batch():
    return _batch


@pytest.fixture(scope="session")
def fresh_state():
    """`fresh_state(run, layout)`: a state as `init_state` makes it; compiled once a model, then placed."""
    known = {}

    def make(run, layout):
        key = (run.model, run.seed, run.moe.freeze_gate, run.optimizer.ema_decay)
        if key not in known:
            known[key] = jax.device_get(init_state(run, one_device_layout(run)))
        return jax.device_put(known[key], state_shardings(run, layout))

    return make


def one_device_layout(run):
    return run_layout(run, make_mesh(devices=jax.devices()[:1]))


@pytest.fixture(scope="session")
def layout_of():
    """`layout_of(run, data=2, ...)`: a layout over as many of the devices as the sizes ask for."""

    def make(run, **sizes):
        count = int(np.prod(list(sizes.values()) or [1]))
        return run_layout(run, make_mesh(**sizes, devices=jax.devices()[:count]))

    return make
