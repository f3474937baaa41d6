"""Groups that begin behind rows of another set: every backend, values and gradients, against each group's own product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ernie_jax.moe.grouped_matmul import BACKENDS, grouped_matmul

R, E, D, F = 40, 4, 8, 6
SIZES = np.array([3, 0, 9, 5])


@pytest.mark.parametrize("first", [0, 1, 13, 23])
@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_rows_before_the_first_are_spare(backend, first):
    rng = np.random.default_rng(0)
    rows, weights, ct = (rng.normal(size=s).astype(np.float32) for s in ((R, D), (E, D, F), (R, F)))
    starts = first + np.cumsum(SIZES) - SIZES
    expected, d_rows, d_weights = np.zeros((R, F)), np.zeros((R, D)), np.zeros((E, D, F))
    for e, (start, size) in enumerate(zip(starts, SIZES, strict=True)):
        own = slice(start, start + size)
        expected[own] = rows[own] @ weights[e]
        d_rows[own] = ct[own] @ weights[e].T
        d_weights[e] = rows[own].T @ ct[own]
    # What stands in spare rows, before and behind, must reach nothing.
    spare = np.ones(R, bool)
    spare[first : first + SIZES.sum()] = False
    rows[spare], ct[spare] = np.nan, np.nan
    product = jax.jit(
        lambda rows, weights, first: grouped_matmul(rows, weights, jnp.asarray(SIZES), backend=backend, first_row=first, sets=2)
    )
    out, pullback = jax.vjp(lambda r, w: product(r, w, jnp.int32(first)), jnp.asarray(rows), jnp.asarray(weights))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    got_rows, got_weights = pullback(jnp.asarray(ct))
    np.testing.assert_allclose(got_rows, d_rows, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got_weights, d_weights, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("first", [0, 2, 3])
def test_a_handful_of_rows(first):
    rng = np.random.default_rng(1)
    rows, weights = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((6, D), (E, D, F)))
    sizes = jnp.asarray([0, 2, 0, 1])
    out = np.asarray(grouped_matmul(rows, weights, sizes, backend="blocks", first_row=jnp.int32(first)))
    expected = np.zeros((6, F))
    for row, expert in zip(range(first, first + 3), (1, 1, 3), strict=True):
        expected[row] = np.asarray(rows[row]) @ np.asarray(weights[expert])
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
