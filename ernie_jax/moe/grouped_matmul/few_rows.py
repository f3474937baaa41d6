"""The product for a handful of rows, as in decoding: each row reads its expert's weights once, where they are kept.

R rows, E groups, D contracted width, F output width, C rows of a weight matrix added at a time.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ernie_jax.moe.grouped_matmul.groups import group_ends

Array = jax.Array


def is_few(num_rows: int, num_groups: int) -> bool:
    """Whether reading weights once a row costs less than a matrix product a group.

    A matrix product of a few rows spends its time copying the weights into the order it wants: on CPU two to three times
    what a row takes here. With twice as many rows as groups, most groups have rows, and both ways cost the same.
    """
    return num_rows <= 2 * num_groups


def few_rows_product(rows: Array, kept: Array, layer: Array, group_sizes: Array, first_row: Array | int = 0) -> Array:
    """rows [R, D], kept [L, E, D, F], layer scalar, group_sizes [E] -> [R, F], zero in spare rows and before `first_row`.

    The sum over D is a chain of vector operations that the compiler fuses with the look-up of the weights, so that they go
    from memory to registers; accumulated in float32.
    """
    num_layers, num_groups, depth, width = kept.shape
    ends = first_row + group_ends(group_sizes)
    index = jnp.arange(rows.shape[0])
    expert = (index[:, None] >= ends).sum(axis=1)
    # bfloat16 as integers: of a look-up of bfloat16 XLA:CPU makes a conversion of all weights first.
    bits = kept.dtype == jnp.bfloat16
    flat = (jax.lax.bitcast_convert_type(kept, jnp.uint16) if bits else kept).reshape(num_layers * num_groups * depth, width)
    first = (layer * num_groups + jnp.minimum(expert, num_groups - 1)) * depth
    at_once = _largest_divisor(depth, 64)

    def add(i: Array, total: Array) -> Array:
        x = jax.lax.dynamic_slice_in_dim(rows, i * at_once, at_once, axis=1).astype(jnp.float32)
        for k in range(at_once):
            weight = jnp.take(flat, first + i * at_once + k, axis=0, mode="clip")
            total = total + x[:, k : k + 1] * (_widen(weight) if bits else weight.astype(jnp.float32))
        return total

    out = jax.lax.fori_loop(0, depth // at_once, add, jnp.zeros((rows.shape[0], width), jnp.float32))
    own = (index >= first_row) & (expert < num_groups)
    return jnp.where(own[:, None], out, 0.0).astype(rows.dtype)


def _widen(bits: Array) -> Array:
    """float32 of bfloat16 given as its 16 bits: they are the upper half."""
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)


def _largest_divisor(number: int, limit: int) -> int:
    return next(d for d in range(min(limit, number), 0, -1) if number % d == 0)
