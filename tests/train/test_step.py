"""The whole step against the same step on one device, and what a step does to each part of the state."""

import jax
import numpy as np
import pytest

from ernie_jax.testing import tiny_moe
from ernie_jax.train.state import trained_values
from ernie_jax.train.step import make_train_step

MOE = {"aux_loss_coef": 0.02, "z_loss_coef": 0.01, "orthogonal_coef": 0.01}
# Far below the gradient's norm, so that clipping is at work and a wrong norm would show in the moments.
OPTIMIZER = {"clip_norm": 0.05}
ONE_LAYER = tiny_moe(num_hidden_layers=1, layer_start=0, num_experts_per_tok=2)


def results(run, layout, state, batch):
    state, metrics = make_train_step(run, layout)(state, batch)
    return jax.device_get((trained_values(run, state.params), state.biases, state.opt_state.mu, metrics))


@pytest.fixture(scope="module")
def reference(tiny_run, layout_of, fresh_state, batch_of):
    run = tiny_run(moe=MOE, optimizer=OPTIMIZER, batch_size=16)
    layout = layout_of(run)
    return results(run, layout, fresh_state(run, layout), batch_of(run))


@pytest.mark.parametrize(
    ("mesh", "zero", "accumulate"),
    [
        ({}, 0, 4),
        ({"data": 8}, 1, 2),
        ({"expert": 8}, 0, 1),
        ({"data": 2, "tensor": 2, "expert": 2}, 3, 4),
    ],
)
def test_a_step_does_not_depend_on_how_it_is_split(
    mesh, zero, accumulate, reference, tiny_run, layout_of, fresh_state, batch_of, assert_close
):
    run = tiny_run(moe=MOE, optimizer=OPTIMIZER, batch_size=16, accumulate=accumulate, mesh={"zero": zero})
    layout = layout_of(run, **mesh)
    values, biases, moments, metrics = results(run, layout, fresh_state(run, layout), batch_of(run))
    want_values, want_biases, want_moments, want_metrics = reference
    # How even the devices are is the one thing that depends on which there are.
    devices = {name: metrics["router"].pop(name) for name in list(metrics["router"]) if name.startswith(("device_", "node_"))}
    assert bool(devices) == ("expert" in mesh)
    assert_close(metrics, want_metrics)
    # The first moment after one step is 0.1 x the clipped gradient: entries of about 1e-3.
    assert_close(moments, want_moments, rtol=1e-4, atol=2e-9)
    assert_close(biases, want_biases)
    # Where a gradient is nearly 0, Adam's first step has its sign and size only by rounding.
    for path, value in values.items():
        clear = np.abs(want_moments[path]) > 1e-6
        np.testing.assert_allclose(value[clear], want_values[path][clear], rtol=1e-5, atol=1e-6, err_msg=path)


def test_metrics_are_what_they_say(reference, tiny_run, batch_of):
    run = tiny_run(batch_size=16)
    _, biases, moments, metrics = reference
    batch = batch_of(run)
    assert set(metrics) == {
        *("loss", "total", "aux", "z", "orthogonal", "grad_norm", "lr", "tokens", "scored_tokens", "skipped", "skipped_in_a_row"),
        "router",
    }
    assert metrics["tokens"] == (batch["segment_ids"] > 0).sum()
    assert metrics["scored_tokens"] == (batch["labels"] >= 0).sum()
    layers = metrics["total"] - metrics["loss"]
    assert layers == pytest.approx(2 * (0.02 * metrics["aux"] + 0.01 * metrics["z"]) + 0.02 * orthogonal_before(run), rel=1e-3)
    router = metrics["router"]
    assert router["load"].shape == (2, 8)
    np.testing.assert_array_equal(router["load"].sum(-1), 2 * metrics["tokens"])
    np.testing.assert_allclose(router["balance"], router["load"].mean(-1) / router["load"].max(-1), rtol=1e-6)
    np.testing.assert_array_equal(router["dropped"], 0)
    bias = next(iter(jax.tree.leaves(biases)))
    np.testing.assert_allclose(bias, 1e-3 * np.sign(router["load"].mean(-1, keepdims=True) - router["load"]), rtol=1e-6)
    np.testing.assert_allclose(router["bias_max"], bias.max(-1), rtol=1e-6)
    assert all(0 < e < np.log(8) for e in router["entropy"])
    # Clipping: the gradients that reached the moments have the norm they were clipped to.
    norm = np.sqrt(sum(np.square(m.astype(np.float64) / 0.1).sum() for m in moments.values()))
    assert metrics["grad_norm"] > 0.05
    assert norm == pytest.approx(0.05, rel=1e-4)


def orthogonal_before(run):
    """Mean over layers of the orthogonal loss of the initial gates, in NumPy."""
    from ernie_jax.models import init_model

    gate = np.asarray(init_model(run.model, run.compute).decoder.segments[1].layers[0].moe.router.gate[...], np.float64)
    rows = gate / np.linalg.norm(gate, axis=-1, keepdims=True)
    return np.square(rows @ np.swapaxes(rows, -1, -2) - np.eye(8)).mean()
