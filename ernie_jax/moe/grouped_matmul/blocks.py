"""The product as a loop over blocks of rows of one group, each block one plain matmul, with its own backward pass.

R rows, E groups, D contracted width, F output width, H rows in a block.

A group of n rows is cut into whole blocks of the tallest height, the rest into whole blocks of the next, and so on; what
is left at the smallest height is one more block that is partly someone else's. So the number of matmuls follows the group
sizes: an empty group costs nothing, and spare rows cost the filling of their outputs with zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

ROW_HEIGHTS = (256, 64)
WEIGHT_HEIGHTS = (256, 64)


def block_product(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """[R, D] rows, [E, D, F] weights, [E] sizes -> [R, F], at most one partly used block a group more than the rows need."""
    # Read here, since the backward pass may be traced where another precision is in force.
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    return _product(precision, rows, weights, group_sizes)


def block_heights(heights: tuple[int, ...], num_rows: int) -> tuple[int, ...]:
    """The heights that fit in `num_rows` rows, tallest first; never empty for one row or more."""
    return tuple(h for h in heights if h <= num_rows) or (num_rows,)


def block_counts(sizes: jax.Array, heights: tuple[int, ...]) -> list[jax.Array]:
    """How many blocks of each height cover groups of these sizes; the blocks of the last height may be partly used."""
    counts = []
    for height in heights[:-1]:
        counts.append(sizes // height)
        sizes = sizes % height
    return [*counts, -(-sizes // heights[-1])]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(precision: str | None, rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return _rows_product(rows, weights, group_sizes, 0, precision)


def _forward(
    precision: str | None, rows: jax.Array, weights: jax.Array, group_sizes: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    return _rows_product(rows, weights, group_sizes, 0, precision), (rows, weights, group_sizes)


def _backward(
    precision: str | None, saved: tuple[jax.Array, jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    rows, weights, group_sizes = saved
    # Two loops rather than one: where only one gradient is wanted, the compiler drops the other loop.
    return (
        _rows_product(cotangent, weights, group_sizes, 1, precision),
        _weights_product(rows, cotangent, group_sizes, precision),
        None,
    )


_product.defvjp(_forward, _backward)


def _rows_product(rows: jax.Array, weights: jax.Array, sizes: jax.Array, contract: int, precision: str | None) -> jax.Array:
    """Rows times W (contract 0) or W transposed (contract 1), zero in spare rows."""
    num_rows = rows.shape[0]
    out = jnp.zeros((num_rows, weights.shape[2 - contract]), rows.dtype)
    if out.size == 0 or weights.shape[0] == 0:
        return out
    heights = block_heights(ROW_HEIGHTS, num_rows)

    def multiply(x: jax.Array, weight: jax.Array) -> jax.Array:
        y = jax.lax.dot_general(x, weight, (((1,), (contract,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)
        return y.astype(rows.dtype)

    def group(expert: jax.Array, start: jax.Array, size: jax.Array, out: jax.Array) -> jax.Array:
        weight = jax.lax.dynamic_index_in_dim(weights, expert, keepdims=False)

        def whole(start: jax.Array, height: int, out: jax.Array) -> jax.Array:
            x = jax.lax.dynamic_slice_in_dim(rows, start, height)
            return jax.lax.dynamic_update_slice_in_dim(out, multiply(x, weight), start, 0)

        def partial(start: jax.Array, height: int, end: jax.Array, out: jax.Array) -> jax.Array:
            # Near the end of the buffer the block is moved up; the rows above `start` are finished and stay.
            # Those past `end` are zeroed: the next group, which comes later, writes its own over them.
            top = jnp.minimum(start, num_rows - height)
            index = top + jnp.arange(height)[:, None]
            y = multiply(jax.lax.dynamic_slice_in_dim(rows, top, height), weight)
            old = jax.lax.dynamic_slice_in_dim(out, top, height)
            new = jnp.where(index < start, old, jnp.where(index < end, y, 0))
            return jax.lax.dynamic_update_slice_in_dim(out, new, top, 0)

        return _for_blocks(start, size, heights, whole, partial, out)

    return _for_groups(sizes, group, out)


def _weights_product(rows: jax.Array, cotangent: jax.Array, sizes: jax.Array, precision: str | None) -> jax.Array:
    """[E, D, F]: each group's X^T dY, summed over its rows in float32; zero for empty groups."""
    num_rows, num_groups = rows.shape[0], sizes.shape[0]
    width = (rows.shape[1], cotangent.shape[1])
    out = jnp.zeros((num_groups, *width), rows.dtype)
    if out.size == 0 or num_rows == 0:
        return out
    heights = block_heights(WEIGHT_HEIGHTS, num_rows)

    def multiply(x: jax.Array, dy: jax.Array) -> jax.Array:
        return jax.lax.dot_general(x, dy, (((0,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)

    def group(expert: jax.Array, start: jax.Array, size: jax.Array, out: jax.Array) -> jax.Array:
        def whole(start: jax.Array, height: int, total: jax.Array) -> jax.Array:
            x, dy = (jax.lax.dynamic_slice_in_dim(a, start, height) for a in (rows, cotangent))
            return total + multiply(x, dy)

        def partial(start: jax.Array, height: int, end: jax.Array, total: jax.Array) -> jax.Array:
            top = jnp.minimum(start, num_rows - height)
            index = top + jnp.arange(height)[:, None]
            own = (index >= start) & (index < end)
            # Both factors are replaced: zero times the NaN of a spare row would be NaN.
            x, dy = (jnp.where(own, jax.lax.dynamic_slice_in_dim(a, top, height), 0) for a in (rows, cotangent))
            return total + multiply(x, dy)

        total = _for_blocks(start, size, heights, whole, partial, jnp.zeros(width, jnp.float32))
        return jax.lax.dynamic_update_index_in_dim(out, total.astype(out.dtype), expert, 0)

    return _for_groups(sizes, group, out)


def _for_groups(sizes: jax.Array, body: Callable[..., jax.Array], carry: jax.Array) -> jax.Array:
    """`body(group, start, size, carry)` over the groups that have rows, in ascending order."""
    starts = jnp.cumsum(sizes) - sizes
    (active,) = jnp.nonzero(sizes, size=sizes.shape[0])

    def step(i: jax.Array, carry: jax.Array) -> jax.Array:
        e = active[i]
        return body(e, starts[e], sizes[e], carry)

    return jax.lax.fori_loop(0, jnp.count_nonzero(sizes), step, carry)


def _for_blocks(
    start: jax.Array,
    size: jax.Array,
    heights: tuple[int, ...],
    whole: Callable[..., jax.Array],
    partial: Callable[..., jax.Array],
    carry: jax.Array,
) -> jax.Array:
    """`whole(start, height, carry)` or `partial(start, height, end, carry)` over the blocks of one group, top to bottom."""
    end = start + size
    for height, count in zip(heights, block_counts(size, heights), strict=True):
        if height != heights[-1]:
            step = functools.partial(lambda i, c, s, h: whole(s + i * h, h, c), s=start, h=height)
        else:
            step = functools.partial(lambda i, c, s, h: partial(s + i * h, h, end, c), s=start, h=height)
        carry = jax.lax.fori_loop(0, count, step, carry)
        start = start + count * height
    return carry
