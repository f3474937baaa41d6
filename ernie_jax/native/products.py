"""Products by the native kernels, in float32. R rows, E groups, D contracted width, F output width, L layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ernie_jax.native.library import ffi_call

Array = jax.Array


def grouped_rows(rows: Array, weights: Array, layer: Array, sizes: Array, first: Array, *, turned: bool = False) -> Array:
    """Rows times their group's weights, zero in rows of no group.

    Args:
      rows: [R, D], or [R, F] if turned; group 0 begins at row `first`.
      weights: [L, E, D, F], of which one layer is read.
      layer: int32 scalar.
      sizes: [E] int32.
      first: int32 scalar.
      turned: times the transpose of the weights.

    Returns:
      [R, F], or [R, D] if turned.
    """
    shape = jax.ShapeDtypeStruct((rows.shape[0], weights.shape[2 if turned else 3]), jnp.float32)
    return ffi_call("ernie_grouped_rows", shape)(rows, weights, layer.reshape(1), sizes, first.reshape(1), turned=turned)


def grouped_weights(rows: Array, cotangent: Array, sizes: Array, first: Array) -> Array:
    """Of each group X^T dY: rows [R, D], cotangent [R, F] -> [E, D, F], zero for a group without rows."""
    shape = jax.ShapeDtypeStruct((sizes.shape[0], rows.shape[1], cotangent.shape[1]), jnp.float32)
    return ffi_call("ernie_grouped_weights", shape)(rows, cotangent, sizes, first.reshape(1))


def product(x: Array, y: Array, *, turned: bool = False) -> Array:
    """x [R, D] times y [D, F], or x [R, F] times the transpose of y."""
    return grouped_rows(x, y[None, None], jnp.int32(0), _all_rows(x), jnp.int32(0), turned=turned)


def contracted_rows(x: Array, y: Array) -> Array:
    """The transpose of x [R, D] times y [R, F] -> [D, F]."""
    return grouped_weights(x, y, _all_rows(x), jnp.int32(0))[0]


def _all_rows(x: Array) -> Array:
    return jnp.full((1,), x.shape[0], jnp.int32)
