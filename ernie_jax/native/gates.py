"""The gate of gated units by the native kernels, in float32. R rows, F width."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ernie_jax.native.library import ffi_call

Array = jax.Array


def gated_silu(gate_up: Array, weights: Array | None) -> Array:
    """silu(gate) up of gate_up [R, 2, F], times the rows' weights [R] if there are any -> [R, F]."""
    rows, _, width = gate_up.shape
    return ffi_call("ernie_gated", jax.ShapeDtypeStruct((rows, width), jnp.float32))(gate_up, _given(weights))


def gated_silu_gradient(gate_up: Array, weights: Array | None, cotangent: Array) -> tuple[Array, Array | None]:
    """With the cotangent [R, F] of that: the gradients of gate_up [R, 2, F] and of the weights [R]."""
    own = _given(weights)
    shapes = tuple(jax.ShapeDtypeStruct(a.shape, jnp.float32) for a in (gate_up, own))
    d_gate_up, d_weights = ffi_call("ernie_gated_gradient", shapes)(gate_up, own, cotangent)
    return d_gate_up, None if weights is None else d_weights


def _given(weights: Array | None) -> Array:
    return jnp.zeros((0,), jnp.float32) if weights is None else weights
