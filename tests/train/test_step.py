"""The whole step against the same step on one device: loss, gradients, router bias, updated weights."""

import jax
import numpy as np
import pytest

from ernie_jax.config.run import MeshConfig
from ernie_jax.train.state import trained_values
from ernie_jax.train.step import make_train_step

MOE = {"aux_loss_coef": 0.02, "z_loss_coef": 0.01, "orthogonal_coef": 0.01}
# Far below the gradient's norm, so that clipping is at work and a wrong norm would show in the moments.
OPTIMIZER = {"clip_norm": 0.05}


def results(run, layout, state, batch):
    state, metrics = make_train_step(run, layout)(state, batch)
    return jax.device_get((trained_values(run, state.params), state.biases, state.opt_state[1].mu, metrics))


@pytest.fixture(scope="module")
def reference(tiny_run, layout_of, fresh_state, make_batch):
    run = tiny_run(moe=MOE, optimizer=OPTIMIZER)
    layout = layout_of(run)
    return results(run, layout, fresh_state(run, layout), make_batch())


def assert_close(got, want, rtol=1e-5, atol=1e-6):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize(
    ("mesh", "zero", "accumulate"),
    [
        ({}, 0, 4),
        ({"data": 8}, 0, 1),
        ({"expert": 8}, 1, 2),
        ({"data": 2, "tensor": 4}, 1, 1),
        ({"data": 2, "tensor": 2, "expert": 2}, 3, 4),
    ],
)
def test_a_step_does_not_depend_on_how_it_is_split(mesh, zero, accumulate, reference, tiny_run, layout_of, fresh_state, make_batch):
    run = tiny_run(moe=MOE, optimizer=OPTIMIZER, accumulate=accumulate, mesh=MeshConfig(zero=zero))
    layout = layout_of(run, **mesh)
    values, biases, moments, metrics = results(run, layout, fresh_state(run, layout), make_batch())
    want_values, want_biases, want_moments, want_metrics = reference
    assert_close(metrics, want_metrics)
    # The first moment after one step is 0.1 x the clipped gradient: entries of about 1e-3.
    assert_close(moments, want_moments, rtol=1e-4, atol=2e-9)
    assert_close(biases, want_biases)
    # Where a gradient is nearly 0, Adam's first step has its sign and size only by rounding.
    for path, value in values.items():
        clear = np.abs(want_moments[path]) > 1e-6
        np.testing.assert_allclose(value[clear], want_values[path][clear], rtol=1e-5, atol=1e-6, err_msg=path)
