"""Steps that are not finite, the EMA, and the end of a run that cannot go on."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ernie_jax.sharding import map_variables
from ernie_jax.testing import tiny_dense
from ernie_jax.train.loop import Loop, NonFiniteError
from ernie_jax.train.preemption import StopSignal
from ernie_jax.train.state import trained_values
from ernie_jax.train.step import make_train_step

SCALE = "norm/scale"


@pytest.fixture(scope="module")
def setting(tiny_run, layout_of, fresh_state, batch_of):
    """(run, compiled step, a way to make states, a batch); the step is compiled once for the module."""
    run = tiny_run(model=tiny_dense(), batch_size=4, optimizer={"ema_decay": 0.9, "max_nonfinite": 3})
    layout = layout_of(run, data=2)
    return run, make_train_step(run, layout), lambda: fresh_state(run, layout), batch_of(run)


def with_scale(state, value):
    """The state with every entry of the final norm's scale replaced."""

    def change(path, variable):
        current = variable.get_value()
        return jax.device_put(jnp.full_like(current, value), current.sharding) if path == SCALE else current

    return dataclasses.replace(state, params=map_variables(change, state.params))


def test_a_nonfinite_step_changes_only_the_counters(setting):
    _, step, make_state, batch = setting
    before = jax.device_get(with_scale(make_state(), np.nan))
    state, metrics = step(with_scale(make_state(), np.nan), batch)
    assert not np.isfinite(metrics["loss"])
    assert (int(state.step), int(state.skipped), int(state.skipped_in_a_row)) == (1, 1, 1)
    for name in ("params", "biases", "opt_state", "ema"):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(getattr(state, name)), getattr(before, name))
    state, metrics = step(with_scale(state, 1.0), batch)
    assert (int(state.step), int(state.skipped), int(state.skipped_in_a_row)) == (2, 1, 0)
    assert np.isfinite(metrics["loss"])
    # Adam has seen one gradient; the schedule has moved on with the data.
    assert int(state.opt_state.count) == 1


def test_ema_follows_the_weights(setting):
    run, step, make_state, batch = setting
    before = jax.device_get(make_state().ema)
    state, _ = step(make_state(), batch)
    values = jax.device_get(trained_values(run, state.params))
    for path, average in jax.device_get(state.ema).items():
        np.testing.assert_allclose(average, 0.9 * before[path] + 0.1 * values[path], rtol=1e-6, atol=1e-9)


def make_loop(run, step, steps):
    return Loop(
        step_fn=step,
        place=lambda b: b,
        hooks=[],
        steps=steps,
        max_nonfinite=run.optimizer.max_nonfinite,
        last_checkpoint=lambda: "step 7",
    )


def test_the_run_ends_after_too_many_in_a_row_and_names_the_checkpoint(setting):
    run, step, make_state, batch = setting
    with pytest.raises(NonFiniteError, match=r"3 steps in a row.*Last good checkpoint: step 7"):
        make_loop(run, step, 50).run(with_scale(make_state(), np.inf), itertools.repeat(batch), StopSignal())


def test_data_that_ends_early_is_an_error_with_the_step(setting):
    run, step, make_state, batch = setting
    with pytest.raises(ValueError, match="the data ended after 2 of 5 steps"):
        make_loop(run, step, 5).run(make_state(), iter([batch, batch]), StopSignal())
