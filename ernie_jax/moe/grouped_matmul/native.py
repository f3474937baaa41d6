"""The product by kernels of our own for CPUs (see `ernie_jax.native`), in float32.

R rows, E groups, D contracted width, F output width, L layers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ernie_jax.native import grouped_rows, grouped_weights

Array = jax.Array


def native_product(
    rows: Array,
    weights: Array,
    group_sizes: Array,
    stack: tuple[Array, Array] | None = None,
    first_row: Array | None = None,
) -> Array:
    """[R, D] rows, [E, D, F] weights, [E] sizes -> [R, F]; `stack` and `first_row` as in `grouped_matmul`.

    Raises:
      ValueError: another format than float32, or no compiler for the kernels.
    """
    if rows.dtype != jnp.float32:
        raise ValueError(f"grouped_matmul backend 'native' multiplies float32, got {rows.dtype}; use 'auto' or 'blocks'")
    kept, layer = (jax.lax.stop_gradient(weights)[None], jnp.int32(0)) if stack is None else stack
    if kept.dtype != jnp.float32:
        kept, layer = jax.lax.stop_gradient(weights)[None], jnp.int32(0)
    first = jnp.int32(0) if first_row is None else first_row.astype(jnp.int32)
    return _product(rows, weights, kept, layer, group_sizes, first)


@jax.custom_vjp
def _product(rows: Array, weights: Array, kept: Array, layer: Array, sizes: Array, first: Array) -> Array:
    # `weights` is what the gradient is of; its values are read from `kept`, so that nothing has to make an array of them.
    return grouped_rows(rows, kept, layer, sizes, first)


def _forward(rows: Array, weights: Array, kept: Array, layer: Array, sizes: Array, first: Array) -> tuple[Array, tuple[Any, ...]]:
    return _product(rows, weights, kept, layer, sizes, first), (rows, kept, layer, sizes, first)


def _backward(saved: tuple[Any, ...], cotangent: Array) -> tuple[Array, Array, None, None, None, None]:
    rows, kept, layer, sizes, first = saved
    d_rows = grouped_rows(cotangent, kept, layer, sizes, first, turned=True)
    return d_rows, grouped_weights(rows, cotangent, sizes, first), None, None, None, None


_product.defvjp(_forward, _backward)
