"""The product as a loop over blocks of rows of one group, each block one plain matmul, with its own backward pass.

R rows, E groups, D contracted width, F output width, H rows in a block.

A group's size is rounded up to a multiple of the low height and cut into as many tall blocks as fit, then low ones. Only its
last block reaches past its end. So the number of matmuls follows the group sizes: an empty group costs nothing, and spare
rows cost the filling of their outputs with zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ernie_jax.moe.grouped_matmul.contraction import contract
from ernie_jax.moe.grouped_matmul.few_rows import few_rows_product, is_few
from ernie_jax.moe.grouped_matmul.groups import group_ends
from ernie_jax.nn.precision import matmul_precision

# Below 64 rows a product spends more time packing the weights than multiplying, above 512 it gains nothing more (measured
# at widths of 256 and 512 on CPU).
LOWEST, LOW, TALL_PER_LOW = 8, 64, 8

Array = jax.Array


def block_product(
    rows: Array,
    weights: Array,
    group_sizes: Array,
    stack: tuple[Array, Array] | None = None,
    first_row: Array | None = None,
    sets: int = 1,
) -> Array:
    """[R, D] rows, [E, D, F] weights, [E] sizes -> [R, F]; `stack`, `first_row` and `sets` as in `grouped_matmul`."""
    kept, layer = (jax.lax.stop_gradient(weights)[None], jnp.int32(0)) if stack is None else stack
    groups = Groups(group_sizes, jnp.int32(0) if first_row is None else first_row.astype(jnp.int32))
    # As integers the kept weights have no tangent: out of a branch zeros for one would be kept.
    settings = _Settings(matmul_precision(), sets, kept.dtype)
    return _product(settings, rows, weights, as_bits(kept), layer, groups)


class Groups(NamedTuple):
    """Which rows are whose: sizes [E], and the first row of group 0."""

    sizes: Array
    first_row: Array


class _Settings(NamedTuple):
    """Precision of the products, how many sets of groups share the rows, and the format of the kept weights."""

    precision: str | None
    sets: int
    kept: jnp.dtype


def block_heights(num_rows: int, num_groups: int) -> tuple[int, int]:
    """The tall and the low height for groups of R / E rows on average: low enough that rounding up adds about a sixteenth."""
    low = LOW
    while low > LOWEST and low * 8 * num_groups > num_rows:
        low //= 2
    low = min(low, num_rows)
    return min(low * TALL_PER_LOW, num_rows // low * low), low


def block_counts(sizes: Array, heights: tuple[int, int]) -> tuple[Array, Array]:
    """How many blocks of each height cover groups of these sizes."""
    tall, low = heights
    lows, per_tall = -(-sizes // low), tall // low
    # More than half a tall block in low ones costs more than the whole of it.
    talls = (lows + (per_tall - 1) // 2) // per_tall
    return talls, jnp.maximum(lows - talls * per_tall, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(settings: _Settings, rows: Array, weights: Array, kept: Array, layer: Array, groups: Groups) -> Array:
    # `weights` is what the gradient is of; its values are read from `kept`, so that nothing has to make an array of them.
    if kept.size and is_few(rows.shape[0], groups.sizes.size):
        return few_rows_product(rows, as_floats(kept, settings.kept), layer, groups.sizes, groups.first_row)
    return _rows_product(rows, kept, layer, groups, 0, settings)


def _forward(
    settings: _Settings, rows: Array, weights: Array, kept: Array, layer: Array, groups: Groups
) -> tuple[Array, tuple[Any, ...]]:
    return _product(settings, rows, weights, kept, layer, groups), (rows, kept, layer, groups)


def _backward(settings: _Settings, saved: tuple[Any, ...], cotangent: Array) -> tuple[Array, Array, None, None, None]:
    rows, kept, layer, groups = saved
    # Two loops rather than one: where only one gradient is wanted, the compiler drops the other loop.
    return (
        _rows_product(cotangent, kept, layer, groups, 1, settings),
        _weights_product(rows, cotangent, groups, settings),
        None,
        None,
        None,
    )


_product.defvjp(_forward, _backward)


def _rows_product(rows: Array, kept: Array, layer: Array, groups: Groups, side: int, settings: _Settings) -> Array:
    """Rows times W (side 0) or W transposed (side 1), zero in spare rows; W of group e has the bits kept[layer, e]."""
    dtype, num_rows = rows.dtype, rows.shape[0]
    rows = as_bits(rows)
    out = jnp.zeros((num_rows, kept.shape[3 - side]), rows.dtype)
    if out.size == 0 or groups.sizes.size == 0:
        return as_floats(out, dtype)

    heights = block_heights(num_rows, settings.sets * groups.sizes.size)

    def group(expert: Array, start: Array, size: Array, out: Array) -> Array:
        weight = jax.lax.dynamic_slice(kept, (layer, expert, 0, 0), (1, 1, *kept.shape[2:])).reshape(kept.shape[2:])
        weight = as_floats(weight, settings.kept).astype(dtype)

        def block(top: Array, index: Array, first: Array, out: Array) -> Array:
            x = as_floats(jax.lax.dynamic_slice_in_dim(rows, top, index.size), dtype)
            y = contract(x, weight, (1, side), settings.precision).astype(dtype)
            # Rows above `first` are finished and stay. Rows past the group's end are zeroed: the next group, which comes
            # later, writes its own over them.
            old = jax.lax.dynamic_slice_in_dim(out, top, index.size)
            new = jnp.where(index < first, old, jnp.where(index < start + size, as_bits(y), 0))
            return jax.lax.dynamic_update_slice_in_dim(out, new, top, 0)

        return for_blocks(start, size, num_rows, heights, block, out)

    return as_floats(for_groups(groups, group, out), dtype)


def _weights_product(rows: Array, cotangent: Array, groups: Groups, settings: _Settings) -> Array:
    """[E, D, F]: each group's X^T dY, summed over its rows in float32; zero for empty groups."""
    dtype, num_rows, width = rows.dtype, rows.shape[0], (rows.shape[1], cotangent.shape[1])
    factors = as_bits(rows), as_bits(cotangent)
    out = jnp.zeros((groups.sizes.size, *width), factors[0].dtype)
    if out.size == 0 or num_rows == 0:
        return as_floats(out, dtype)

    heights = block_heights(num_rows, settings.sets * groups.sizes.size)

    def group(expert: Array, start: Array, size: Array, out: Array) -> Array:
        def block(top: Array, index: Array, first: Array, total: Array) -> Array:
            own = (index >= first) & (index < start + size)
            # Both factors are replaced: zero times the NaN of a spare row would be NaN.
            x, dy = (jnp.where(own, jax.lax.dynamic_slice_in_dim(a, top, index.size), 0) for a in factors)
            return total + contract(as_floats(x, dtype), as_floats(dy, dtype), (0, 0), settings.precision)

        total = for_blocks(start, size, num_rows, heights, block, jnp.zeros(width, jnp.float32))
        return jax.lax.dynamic_update_index_in_dim(out, as_bits(total.astype(dtype)), expert, 0)

    return as_floats(for_groups(groups, group, out), dtype)


def as_bits(x: Array) -> Array:
    """16-bit and 8-bit floats as integers, for buffers that a loop reads and writes in parts.

    For want of arithmetic in these formats XLA:CPU widens a slice or update of such a buffer to a conversion of the whole of it,
    there and back in every round of the loop; integers it leaves where they are.
    """
    bits = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize)
    return x if bits is None else jax.lax.bitcast_convert_type(x, bits)


def as_floats(x: Array, dtype: jnp.dtype) -> Array:
    """The inverse of `as_bits`."""
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


def for_groups(groups: Groups, body: Callable[[Array, Array, Array, Array], Array], carry: Array) -> Array:
    """`body(group, start, size, carry)` over the groups that have rows, in ascending order."""
    sizes = groups.sizes
    starts = groups.first_row + group_ends(sizes) - sizes
    before = group_ends((sizes > 0).astype(jnp.int32))  # groups with rows, up to and with this one
    # The i-th group with rows; a sum over a mask for the reason given in `group_ends`.
    active = (before <= jnp.arange(sizes.size)[:, None]).sum(axis=1)

    def step(i: Array, carry: Array) -> Array:
        e = active[i]
        return body(e, starts[e], sizes[e], carry)

    return jax.lax.fori_loop(0, before[-1], step, carry)


def for_blocks(
    start: Array,
    size: Array,
    num_rows: int,
    heights: tuple[int, int],
    body: Callable[[Array, Array, Array, Array], Array],
    carry: Array,
) -> Array:
    """`body(top, index, first, carry)` over the blocks of one group: rows of indices `index` [H, 1].

    `top` is the first of them, `first` the first not done before: a block that would reach past the end of the buffer is moved up.
    """
    for height, count in zip(heights, block_counts(size, heights), strict=True):

        def step(i: Array, carry: Array, start: Array = start, height: int = height) -> Array:
            first = start + i * height
            top = jnp.minimum(first, num_rows - height)
            return body(top, top + jnp.arange(height)[:, None], first, carry)

        carry = jax.lax.fori_loop(0, count, step, carry)
        start = start + count * height
    return carry
