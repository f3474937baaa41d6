"""Arrays in FP8 with a scale a tile. R rows, D and F widths, E groups; a tile at the end of an axis may be shorter.

Activations and gradients have tiles of 1 x 128 along the axis that a product sums over, weights tiles of 128 x 128. The scale
of a tile is its largest magnitude over the format's largest number (448 or 57,344): no history, no calibration.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ernie_jax.nn.fp8.formats import E4M3, largest

TILE = 128

# Magnitudes below float32's normal numbers count as zero: some processors flush them, and no result may depend on that.
_SMALLEST = float(np.finfo(np.float32).tiny)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """`values` times the scale of their tile.

    Attributes:
      values: [..., n1, .., nk] in an FP8 format.
      scales: [..., ceil(n1 / t1), .., ceil(nk / tk)] float32.
      tile: (t1, .., tk), sizes of a tile in the last k axes; 1 in the others.
    """

    values: jax.Array
    scales: jax.Array
    tile: tuple[int, ...] = field(metadata={"static": True})

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """[..., n1, .., nk]; in float32 exact up to one rounding of the product."""
        product = self.values.astype(jnp.float32) * spread(self.scales, self.tile, self.values.shape)
        return product.astype(dtype)


def quantize(x: jax.Array, dtype: DTypeLike, tile: tuple[int, ...]) -> Quantized:
    """`x` in FP8 with one scale a tile.

    A tile of zeros has scale 1. Numbers are rounded to the nearest, ties to even, and saturate at the format's largest. Of a
    tile with a number that is not finite the whole dequantises to NaN, so that it is seen rather than clipped away.

    Args:
      x: any floating-point array.
      dtype: `E4M3` or `E5M2`.
      tile: sizes of a tile in the last axes of x.
    """
    x = x.astype(jnp.float32)
    scales = tile_scales(_maxima(jnp.abs(x), tile), dtype)
    return Quantized(_cast(x, spread(scales, tile, x.shape), dtype), scales, tile)


def quantize_rows(x: jax.Array, dtype: DTypeLike = E4M3) -> tuple[jax.Array, jax.Array]:
    """x [..., D] in tiles of 1 x 128: (values [..., D] in FP8, scales [..., ceil(D / 128)] float32); see `quantize`."""
    quantized = quantize(x, dtype, (TILE,))
    return quantized.values, quantized.scales


def requantized_by_tokens(x: jax.Array, group_sizes: jax.Array, first_row: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`x` after a round trip through FP8 in tiles of 128 x 1 rows of one group: what a product that sums over rows takes.

    Tiles are counted from each group's first row, so a group's last tile is shorter. Which rows share a tile depends on how
    tokens are spread over devices, and so do the scales.

    Args:
      x: [R, D], sorted by group as in `grouped_matmul`.
      group_sizes: [E] integers.
      first_row: scalar, where group 0 begins.
      dtype: `E4M3` or `E5M2`.

    Returns:
      [R, D] float32.
    """
    x = x.astype(jnp.float32)
    count, groups = x.shape[0], group_sizes.size
    row, ends = jnp.arange(count), first_row + jnp.cumsum(group_sizes)
    group = (row[:, None] >= ends).sum(axis=1)
    own = (row >= first_row) & (group < groups)
    known = jnp.minimum(group, groups - 1)
    starts, tiles = ends - group_sizes, -(-group_sizes // TILE)
    most = count // TILE + groups  # each group fills all of its tiles but one
    index = (jnp.cumsum(tiles) - tiles)[known] + (row - starts[known]) // TILE
    # Rows of no group share a tile of their own, whatever they hold.
    index = jnp.where(own, index, most)
    maxima = jax.ops.segment_max(jnp.abs(x), index, num_segments=most + 1)
    scales = tile_scales(jnp.maximum(maxima, 0.0), dtype)[index]
    return _cast(x, scales, dtype).astype(jnp.float32) * scales


def tile_scales(maxima: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The scale of tiles with these largest magnitudes, float32; 1 for tiles of zeros, NaN for NaN, infinite for infinite."""
    # By the reciprocal, which XLA would make of a division by a constant anyway, or not, depending on backend and surroundings.
    scales = jnp.maximum(maxima * np.float32(1.0 / largest(dtype)), _SMALLEST)
    return jnp.where(maxima < _SMALLEST, 1.0, scales)


def _cast(x: jax.Array, scales: jax.Array, dtype: DTypeLike) -> jax.Array:
    # Clipped before the cast, which would make NaN of what lies beyond; a NaN passes the clipping. Of an infinite scale the
    # finite numbers become 0, which times the scale is NaN.
    bound = largest(dtype)
    return jnp.clip(x / scales, -bound, bound).astype(dtype)


def _maxima(x: jax.Array, tile: tuple[int, ...]) -> jax.Array:
    """Maximum of each tile of x >= 0."""
    pads, shape, inside = [], [], []
    for size, step in zip(x.shape, _full(tile, x.ndim), strict=True):
        count = -(-size // step)
        if step == 1:
            pads.append((0, 0))
            shape.append(size)
        elif count == 1:
            pads.append((0, 0))
            inside.append(len(shape) + 1)
            shape += [1, size]
        else:
            pads.append((0, count * step - size))
            inside.append(len(shape) + 1)
            shape += [count, step]
    return jnp.max(jnp.pad(x, pads).reshape(shape), axis=tuple(inside), initial=0.0)


def spread(scales: jax.Array, tile: tuple[int, ...], shape: tuple[int, ...]) -> jax.Array:
    """Each entry's scale; an axis of a single tile is left to broadcasting."""
    for axis, (size, step) in enumerate(zip(shape, _full(tile, len(shape)), strict=True)):
        if step > 1 and scales.shape[axis] > 1:
            scales = jax.lax.slice_in_dim(jnp.repeat(scales, step, axis=axis), 0, size, axis=axis)
    return scales


def _full(tile: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    return (1,) * (ndim - len(tile)) + tile
