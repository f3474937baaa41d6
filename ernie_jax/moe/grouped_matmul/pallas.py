"""The product as Pallas kernels for NVIDIA GPUs (through Triton), with their own backward pass.

R rows, E groups, D contracted width, F output width; a tile is H rows of one group, and N a tile's output columns.

Each group is cut into tiles from its own first row, so that a tile has one group's weights and only a group's last tile is
partly filled; masked loads and stores take care of that one. The spare rows are cut likewise, as one more group whose tiles
multiply nothing and write zeros. So the number of products follows the group sizes. Grids are static: they have room for the
worst sizes, and a program without a tile ends at once.

On CPU the same kernels run in Pallas' interpret mode, ten to a hundred times slower than `blocks`: for tests, and only for
those who ask for `pallas` by name. The platform is that for which a program is lowered, so it may be compiled for a GPU
on a machine without one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ernie_jax.moe.grouped_matmul.contraction import contract
from ernie_jax.moe.grouped_matmul.groups import group_ends
from ernie_jax.nn.precision import matmul_precision

# Triton's matrix products want at least 16 in each direction. Tiles of 128 x 128 outputs and 128 bytes of depth keep three
# stages of loads within 100 KiB of shared memory, which all GPUs since Ampere have.
SMALLEST, LARGEST, DEPTH_BYTES, STAGES = 16, 128, 128, 3

Array = jax.Array
# An array in the device's memory as a kernel sees it, which JAX exports no type for.
Ref = Any


def pallas_product(rows: Array, weights: Array, group_sizes: Array) -> Array:
    """[R, D] rows, [E, D, F] weights, [E] sizes -> [R, F]."""
    return _product(matmul_precision(), rows, weights, group_sizes)


class RowTiles(NamedTuple):
    """Tiles in the order of their rows, each [tiles] int32.

    Attributes:
      group: whose weights it takes.
      busy: 1 where there is something to multiply; 0 over spare rows, and in tiles that are not needed.
      first, end: its rows; `first == end == 0` in tiles that are not needed, which come last.
    """

    group: Array
    busy: Array
    first: Array
    end: Array

    @classmethod
    def cut(cls, sizes: Array, num_rows: int, height: int) -> RowTiles:
        """Tiles of at most `height` rows over all `num_rows` rows."""
        num_groups = sizes.size
        sizes = jnp.append(sizes, num_rows - sizes.sum())
        ends, counts = group_ends(sizes), -(-sizes // height)
        tile_ends = group_ends(counts)
        index = jnp.arange(most_tiles(num_rows, num_groups + 1, height), dtype=jnp.int32)
        group = (tile_ends <= index[:, None]).sum(axis=1, dtype=jnp.int32)
        busy, needed, group = group < num_groups, group <= num_groups, jnp.minimum(group, num_groups)
        first = (ends - sizes)[group] + (index - (tile_ends - counts)[group]) * height
        end = jnp.minimum(first + height, ends[group])
        return cls(
            jnp.minimum(group, num_groups - 1), busy.astype(jnp.int32), jnp.where(needed, first, 0), jnp.where(needed, end, 0)
        )


def most_tiles(num_rows: int, num_groups: int, height: int) -> int:
    """The most tiles that any sizes of `num_groups` groups, R in all, can need: each group fills all of its tiles but one."""
    return (num_rows + num_groups * (height - 1)) // height


class _Tile(NamedTuple):
    """Static sizes of a kernel's tile: rows (or rows of the weight gradient), columns, and contracted entries at a time."""

    height: int
    width: int
    depth: int

    @property
    def compiler_params(self) -> triton.CompilerParams:
        return triton.CompilerParams(num_warps=8 if self.height * self.width >= LARGEST**2 else 4, num_stages=STAGES)


def _side(size: int) -> int:
    """A power of two that suits `size`, from 16 to 128."""
    return min(max(pl.next_power_of_2(max(size, 1)), SMALLEST), LARGEST)


def _depth(size: int, dtype: jnp.dtype) -> int:
    return min(_side(size), DEPTH_BYTES // dtype.itemsize)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(precision: str | None, rows: Array, weights: Array, group_sizes: Array) -> Array:
    return _rows_product(rows, weights, group_sizes, 0, precision)


def _forward(precision: str | None, *operands: Array) -> tuple[Array, tuple[Array, ...]]:
    return _product(precision, *operands), operands


def _backward(precision: str | None, saved: tuple[Array, ...], cotangent: Array) -> tuple[Array, Array, None]:
    rows, weights, group_sizes = saved
    return (
        _rows_product(cotangent, weights, group_sizes, 1, precision),
        _weights_product(rows, cotangent, group_sizes, precision),
        None,
    )


_product.defvjp(_forward, _backward)


def _rows_product(rows: Array, weights: Array, sizes: Array, side: int, precision: str | None) -> Array:
    """Rows times W (side 0) or W transposed (side 1), zero in spare rows."""
    (num_rows, inner), outer = rows.shape, weights.shape[2 - side]
    if num_rows == 0 or outer == 0 or inner == 0 or sizes.size == 0:
        return jnp.zeros((num_rows, outer), rows.dtype)
    tile = _Tile(_side(num_rows // sizes.size), _side(outer), _depth(inner, rows.dtype))
    tiles = RowTiles.cut(sizes, num_rows, tile.height)
    # One grid dimension, columns fastest: programs that run together share their rows, and few groups' weights.
    grid = tiles.group.size * pl.cdiv(outer, tile.width)
    kernel = functools.partial(_rows_kernel, tile=tile, side=side, precision=precision)
    return _call(kernel, grid, (num_rows, outer), tile, *tiles, rows, weights)


def _rows_kernel(
    group_ref: Ref,
    busy_ref: Ref,
    first_ref: Ref,
    end_ref: Ref,
    rows_ref: Ref,
    weights_ref: Ref,
    out_ref: Ref,
    *,
    tile: _Tile,
    side: int,
    precision: str | None,
) -> None:
    """One tile's rows times N columns of its group's weights."""
    inner, outer = rows_ref.shape[1], out_ref.shape[1]
    program, columns = pl.program_id(0), pl.cdiv(outer, tile.width)
    row_tile, left = jax.lax.div(program, columns), jax.lax.rem(program, columns) * tile.width
    group, first, end = group_ref[row_tile], first_ref[row_tile], end_ref[row_tile]
    own = _inside(first, tile.height, end)
    column = _inside(left, tile.width, outer)

    def step(k: Array, total: Array) -> Array:
        top = k * tile.depth
        deep = _inside(top, tile.depth, inner)
        x = _load(rows_ref.at[pl.ds(first, tile.height), pl.ds(top, tile.depth)], own, deep)
        if side == 0:
            w = _load(weights_ref.at[group, pl.ds(top, tile.depth), pl.ds(left, tile.width)], deep, column)
        else:
            w = _load(weights_ref.at[group, pl.ds(left, tile.width), pl.ds(top, tile.depth)], column, deep)
        return total + contract(x, w, (1, side), precision)

    # A product, for Triton gets the type of a choice between two constants wrong.
    steps = busy_ref[row_tile] * pl.cdiv(inner, tile.depth)
    total = jax.lax.fori_loop(0, steps, step, jnp.zeros((tile.height, tile.width), jnp.float32))
    out = out_ref.at[pl.ds(first, tile.height), pl.ds(left, tile.width)]
    triton.store(out, total.astype(out_ref.dtype), mask=own[:, None] & column[None])


def _weights_product(rows: Array, cotangent: Array, sizes: Array, precision: str | None) -> Array:
    """[E, D, F]: each group's X^T dY, summed over its rows in float32; zero for empty groups."""
    num_rows, shape = rows.shape[0], (sizes.size, rows.shape[1], cotangent.shape[1])
    if num_rows == 0 or 0 in shape:
        return jnp.zeros(shape, rows.dtype)
    tile = _Tile(_side(shape[1]), _side(shape[2]), _depth(num_rows // sizes.size, rows.dtype))
    ends = group_ends(sizes)
    grid = sizes.size * pl.cdiv(shape[1], tile.height) * pl.cdiv(shape[2], tile.width)
    kernel = functools.partial(_weights_kernel, tile=tile, precision=precision)
    return _call(kernel, grid, shape, tile, ends - sizes, ends, rows, cotangent)


def _weights_kernel(
    first_ref: Ref, end_ref: Ref, rows_ref: Ref, cotangent_ref: Ref, out_ref: Ref, *, tile: _Tile, precision: str | None
) -> None:
    """One rectangle of one group's weight gradient, over all rows of the group."""
    _, height, width = out_ref.shape
    program, columns, rows = pl.program_id(0), pl.cdiv(width, tile.width), pl.cdiv(height, tile.height)
    left = jax.lax.rem(program, columns) * tile.width
    above, group = (part(jax.lax.div(program, columns), rows) for part in (jax.lax.rem, jax.lax.div))
    above = above * tile.height
    first, end = first_ref[group], end_ref[group]
    line, column = _inside(above, tile.height, height), _inside(left, tile.width, width)

    def step(k: Array, total: Array) -> Array:
        top = first + k * tile.depth
        # Rows of other groups, and the NaN of spare ones, are not even read.
        own = _inside(top, tile.depth, end)
        x = _load(rows_ref.at[pl.ds(top, tile.depth), pl.ds(above, tile.height)], own, line)
        dy = _load(cotangent_ref.at[pl.ds(top, tile.depth), pl.ds(left, tile.width)], own, column)
        return total + contract(x, dy, (0, 0), precision)

    steps = jax.lax.div(end - first + tile.depth - 1, tile.depth)
    total = jax.lax.fori_loop(0, steps, step, jnp.zeros((tile.height, tile.width), jnp.float32))
    out = out_ref.at[group, pl.ds(above, tile.height), pl.ds(left, tile.width)]
    triton.store(out, total.astype(out_ref.dtype), mask=line[:, None] & column[None])


def _call(kernel: Callable[..., None], grid: int, shape: tuple[int, ...], tile: _Tile, *operands: Array) -> Array:
    """Runs `kernel` over whole arrays: by Triton on CUDA, interpreted on CPU."""
    call = functools.partial(
        pl.pallas_call, kernel, jax.ShapeDtypeStruct(shape, operands[-1].dtype), grid=(grid,), compiler_params=tile.compiler_params
    )
    out: Array = jax.lax.platform_dependent(*operands, cuda=call(), cpu=call(interpret=True))
    return out


def _inside(start: Array, size: int, end: Array | int) -> Array:
    """[size] bool: which of `size` indices from `start` are below `end`."""
    return start + jnp.arange(size, dtype=jnp.int32) < end


def _load(ref: Ref, first: Array, second: Array) -> Array:
    """The block [first, second] of a reference, zero outside the masks of its two directions."""
    return triton.load(ref, mask=first[:, None] & second[None], other=0)
