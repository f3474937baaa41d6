"""Weights read where they are kept: the product over a stack of layers, and a handful of rows. L layers, E groups, R rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ernie_jax.moe.grouped_matmul import grouped_matmul
from ernie_jax.moe.grouped_matmul.few_rows import few_rows_product, is_few

LAYERS, GROUPS, DEPTH, WIDTH = 3, 4, 12, 5


def stack_of(dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(0).normal(size=(LAYERS, GROUPS, DEPTH, WIDTH)), dtype)


def rows_of(count, dtype=jnp.float32, real=None):
    rows = np.random.default_rng(1).normal(size=(count, DEPTH))
    rows[count if real is None else real :] = np.nan
    return jnp.asarray(rows, dtype)


@pytest.mark.parametrize("sizes", [[2, 0, 3, 1], [0, 0, 0, 6], [40, 0, 17, 3], [0, 0, 0, 0]])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_stack_gives_the_values_and_the_layer_gets_the_gradient(sizes, dtype):
    stack, rows, sizes = stack_of(), rows_of(sum(sizes) + 2, dtype, sum(sizes)), jnp.asarray(sizes)

    def apart(rows, own):
        return grouped_matmul(rows, own.astype(dtype), sizes, backend="blocks")

    def in_place(rows, own):
        return grouped_matmul(rows, own.astype(dtype), sizes, backend="blocks", stack=(stack, jnp.int32(1)))

    out, pullback = jax.vjp(jax.jit(in_place), rows, stack[1])
    expected, expected_pullback = jax.vjp(jax.jit(apart), rows, stack[1])
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == jnp.float32 else {"rtol": 2e-2, "atol": 2e-2}
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(expected, np.float32), **tolerance)
    cotangent = jnp.ones_like(out)
    for a, b in zip(pullback(cotangent), expected_pullback(cotangent), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), **tolerance)


@pytest.mark.parametrize("sizes", [[1, 0, 2, 0], [0, 5, 0, 0], [0, 0, 0, 0]])
@pytest.mark.parametrize("kept", [jnp.float32, jnp.bfloat16])
def test_few_rows_equal_a_loop_and_spare_rows_are_zero(sizes, kept):
    stack, rows = stack_of(kept), rows_of(6, real=sum(sizes))
    out = jax.jit(few_rows_product)(rows, stack, jnp.int32(2), jnp.asarray(sizes))
    expert = np.repeat(np.arange(GROUPS), sizes)
    weights = np.asarray(stack[2], np.float64)
    expected = np.einsum("rd,rdf->rf", np.asarray(rows[: len(expert)], np.float64), weights[expert])
    np.testing.assert_allclose(out[: len(expert)], expected, rtol=1e-5, atol=1e-5)
    assert (np.asarray(out[len(expert) :]) == 0).all()


def test_weights_of_groups_without_rows_are_not_read():
    # NaN would show in a product with a mask, and in a sum over experts with zero weights.
    stack = stack_of().at[:, jnp.array([0, 3])].set(jnp.nan).at[0].set(jnp.nan)
    for count, sizes in ((3, [0, 1, 2, 0]), (20, [0, 9, 11, 0])):
        assert is_few(count, GROUPS) == (count == 3)
        out = grouped_matmul(rows_of(count), stack[1], jnp.asarray(sizes), backend="blocks", stack=(stack, jnp.int32(1)))
        assert np.isfinite(out).all()
