"""The loss scale: exact where nothing overflows, halved and the step skipped where something does, saved with the run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ernie_jax.config.data import DataConfig
from ernie_jax.config.optimization import OptimizerConfig
from ernie_jax.testing import tiny_dense, tiny_moe
from ernie_jax.train import train
from ernie_jax.train.loss_scale import LossScale
from ernie_jax.train.records import read_records
from ernie_jax.train.state import abstract_state
from ernie_jax.train.step import make_train_step

MODEL = tiny_moe(num_hidden_layers=2, num_experts_per_tok=2)


def scale_of(state):
    return float(state.loss_scale.scale), int(state.loss_scale.finite_steps)


def test_it_is_halved_by_a_bad_step_and_doubled_by_enough_good_ones():
    scale = LossScale.initial(OptimizerConfig(loss_scale=4.0))
    seen = []
    for finite in (True, False, True, True, True, False, False, False, True, True):
        scale = scale.after(jnp.bool_(finite), 3)
        seen.append((float(scale.scale), int(scale.finite_steps)))
    # Three good ones in a row double it; it stays at 1.
    assert seen == [(4, 1), (2, 0), (2, 1), (2, 2), (4, 0), (2, 0), (1, 0), (1, 0), (1, 1), (1, 2)]


def test_it_stays_finite():
    scale = LossScale.initial(OptimizerConfig(loss_scale=2.0**32))
    assert float(scale.after(jnp.bool_(True), 1).scale) == 2.0**32


@pytest.mark.parametrize("value", [3.0, 0.5, 0.0, -2.0, float("inf"), 2.0**33])
def test_only_powers_of_two_from_1(value):
    with pytest.raises(ValueError, match="power of two from 1"):
        OptimizerConfig(loss_scale=value)


@pytest.fixture(scope="module")
def runs(tiny_run, layout_of):
    """name -> (run, layout, compiled step)."""
    made = {}
    for name, optimizer in (("plain", {}), ("scaled", {"loss_scale": 2.0**12, "loss_scale_growth": 2})):
        run = tiny_run(model=MODEL, batch_size=4, accumulate=2, optimizer=optimizer, precision="fp8")
        layout = layout_of(run)
        made[name] = run, layout, make_train_step(run, layout)
    return made


def fresh(runs, fresh_state, name, scale=None):
    run, layout, _ = runs[name]
    state = fresh_state(runs["plain"][0], layout)
    if name == "plain":
        return state
    start = LossScale.initial(dataclasses.replace(run.optimizer, loss_scale=scale or run.optimizer.loss_scale))
    return dataclasses.replace(state, loss_scale=jax.device_put(start, layout.replicated))


def test_a_scale_changes_no_bit_of_a_step(runs, fresh_state, batch_of):
    """Within one program: another program may add in another order."""
    batch, step = batch_of(runs["scaled"][0]), runs["scaled"][2]
    results = []
    for scale in (1.0, 2.0**12):
        state, metrics = step(fresh(runs, fresh_state, "scaled", scale), batch)
        assert metrics["loss_scale"] == scale
        results.append(jax.device_get((state.params, state.opt_state, metrics["grad_norm"], metrics["total"])))
    jax.tree.map(np.testing.assert_array_equal, *results)
    _, plain = runs["plain"][2](fresh(runs, fresh_state, "plain"), batch)
    assert "loss_scale" not in plain
    assert float(plain["grad_norm"]) == pytest.approx(float(results[0][2]), rel=1e-5)


def test_an_overflow_skips_the_step_and_the_next_one_is_taken(runs, fresh_state, batch_of):
    run, _, step = runs["scaled"]
    batch = batch_of(run)
    state = fresh(runs, fresh_state, "scaled")
    # A loss of about 4 times 2^127 is beyond float32.
    before = jax.device_get(state.params)
    state = dataclasses.replace(state, loss_scale=dataclasses.replace(state.loss_scale, scale=jnp.float32(2.0**127)))
    state, metrics = step(state, batch)
    assert (int(state.skipped), float(metrics["loss_scale"]), scale_of(state)) == (1, 2.0**127, (2.0**126, 0))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), before)
    assert np.isfinite(metrics["loss"])
    state = dataclasses.replace(state, loss_scale=dataclasses.replace(state.loss_scale, scale=jnp.float32(64.0)))
    for expected in ((64.0, 1), (128.0, 0)):
        state, metrics = step(state, batch)
        assert (int(state.skipped_in_a_row), scale_of(state)) == (0, expected)
    assert int(state.opt_state.count) == 2


def test_a_run_goes_on_from_checkpoints_with_and_without_one(tiny_run, tmp_path):
    """Step 1 has none, as checkpoints from before there were any; 2-3 begin one; 4-5 carry it on; 6 drops it."""
    data = DataConfig(kind="standard_library", max_bytes=300_000)
    for steps, scale in ((1, None), (3, 256.0), (5, 256.0), (6, None)):
        optimizer = {"loss_scale": scale, "loss_scale_growth": 3}
        dense = tiny_dense(vocab_size=300)
        schedule = {"kind": "constant"}
        run = tiny_run(mesh={"data": 8}, model=dense, data=data, steps=steps, optimizer=optimizer, schedule=schedule, log_every=1)
        train(run, tmp_path, say=lambda line: None)
    records = read_records(tmp_path / "metrics.jsonl")
    assert [r.get("loss_scale") for r in records] == [None, 256, 256, 256, 512, None]
    assert all(np.isfinite(r["loss"]) for r in records)


def test_metrics_tell_what_the_casts_lose(runs, fresh_state, batch_of):
    run, _, step = runs["scaled"]
    _, metrics = step(fresh(runs, fresh_state, "scaled"), batch_of(run))
    router = metrics["router"]
    for operand in ("gate_up", "down"):
        assert router[f"fp8_overflow_{operand}"].shape == (1,)
        assert float(router[f"fp8_overflow_{operand}"][0]) == 0
        assert 0 <= float(router[f"fp8_underflow_{operand}"][0]) < 0.02


def test_the_state_has_a_scale_only_where_the_run_has(runs):
    assert abstract_state(*runs["plain"][:2]).loss_scale is None
    assert abstract_state(*runs["scaled"][:2]).loss_scale.scale.dtype == jnp.float32
