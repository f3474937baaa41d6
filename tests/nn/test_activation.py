"""The gate of gated units: the native kernel against the plain expression, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ernie_jax.native import gated_silu, gated_silu_gradient, switched_off
from ernie_jax.nn.activation import gated, gated_rows


def inputs(rows: int, width: int, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    """gate_up [R, 2, F] with gates to where an exponential over- or underflows, weights [R], cotangent [R, F]."""
    rng = np.random.default_rng(seed)
    gate_up = rng.standard_normal((rows, 2, width)).astype(np.float32)
    gate_up[:, 0] *= rng.choice([0.1, 5.0, 60.0], (rows, width))
    draws = gate_up, rng.standard_normal(rows), rng.standard_normal((rows, width))
    return tuple(jnp.asarray(x, jnp.float32) for x in draws)


def expected(gate_up: jax.Array, weights: jax.Array, ct: jax.Array) -> tuple[np.ndarray, ...]:
    """Value and gradients in float64, by hand."""
    x, w, dy = (np.asarray(a, np.float64) for a in (gate_up, weights, ct))
    gate, up = x[:, 0], x[:, 1]
    s = 1 / (1 + np.exp(-gate))
    own = dy * w[:, None]
    d_gate_up = np.stack([own * up * s * (1 + gate * (1 - s)), own * gate * s], axis=1)
    return gate * s * up * w[:, None], d_gate_up, (dy * gate * s * up).sum(axis=1)


# Rows and widths that fill no vector, one vector and a rest, several pieces of work.
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 7), (37, 515), (4096, 17), (300, 256), (2, 40_000)])
def test_native_gate_equals_the_formula(rows, width):
    gate_up, weights, ct = inputs(rows, width)
    got = gated_silu(gate_up, weights), *gated_silu_gradient(gate_up, weights, ct)
    wanted = expected(gate_up, weights, ct)
    # A sum over the width is as exact as its terms are large, not as it is itself.
    terms = np.abs(np.asarray(ct) * np.asarray(gated_silu(gate_up, None))).sum(axis=1).max()
    for found, value, size in zip(got, wanted, (*(np.abs(w).max() for w in wanted[:2]), terms), strict=True):
        np.testing.assert_allclose(found, value, rtol=2e-6, atol=2e-6 * size)
    ones = jnp.ones(rows)
    np.testing.assert_array_equal(gated_silu(gate_up, None), gated_silu(gate_up, ones))
    d_gate_up, d_weights = gated_silu_gradient(gate_up, None, ct)
    np.testing.assert_array_equal(d_gate_up, gated_silu_gradient(gate_up, ones, ct)[0])
    assert d_weights is None


def test_what_is_no_number_stays_none():
    gate_up = jnp.zeros((2, 2, 33)).at[0, 0, 3].set(jnp.nan).at[1, 1, 32].set(jnp.nan)
    assert np.argwhere(np.isnan(gated_silu(gate_up, None))).tolist() == [[0, 3], [1, 32]]


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_gates_with_and_without_kernels_agree(activation):
    gate_up, weights, ct = inputs(96, 200)

    def value_and_gradients():
        rows = jax.vjp(lambda x, w: gated_rows(x, w, activation), gate_up, weights)
        tokens = jax.vjp(lambda x: gated(x.reshape(4, 24, 2, 200), activation).reshape(96, 200), gate_up)
        return rows[0], *rows[1](ct), tokens[0], *tokens[1](ct)

    native = value_and_gradients()
    with switched_off():
        plain = value_and_gradients()
    for got, wanted in zip(native, plain, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6 * float(jnp.abs(wanted).max()))


def test_the_kernel_is_taken_for_many_numbers_of_silu_in_float32():
    def text(rows: int, dtype: str = "float32", activation: str = "silu") -> str:
        gate_up = jnp.zeros((rows, 2, 128), dtype)
        return str(jax.make_jaxpr(lambda x: gated_rows(x, jnp.ones(rows, dtype), activation))(gate_up))

    assert "ernie_gated" in text(512)
    assert not any("ernie_gated" in other for other in (text(8), text(512, "bfloat16"), text(512, activation="gelu")))
