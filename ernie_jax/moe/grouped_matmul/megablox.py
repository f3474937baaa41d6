"""The product by JAX's own Pallas kernels for TPU, `megablox`, with spare rows and empty groups made safe.

R rows, E groups, D contracted width, F output width. A tile of rows at a group's border is visited once for each group it
belongs to, so that the work follows the group sizes at every width, on every generation of TPU. On CPU the kernels are
interpreted, ten to a hundred times slower than `blocks`: for tests, and only for those who ask for `megablox` by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox import gmm

from ernie_jax.nn.precision import matmul_precision

# Rows, contracted entries and columns of a tile: 128 is the height and width of the matrix unit; larger ones read less.
SMALLEST, LARGEST = 128, 512

Array = jax.Array


def megablox_product(rows: Array, weights: Array, group_sizes: Array) -> Array:
    """[R, D] rows, [E, D, F] weights, [E] sizes -> [R, F]."""
    num_rows = rows.shape[0]
    if 0 in (*rows.shape, *weights.shape):
        return jnp.zeros((num_rows, weights.shape[2]), rows.dtype)
    # The kernels take whole tiles of rows, and leave those of no group unwritten. With zeros put in on both sides, here and
    # in the transpose of the last line, nothing of a spare row or of its cotangent gets in or out.
    used = (jnp.arange(num_rows) < group_sizes.sum())[:, None]
    padded = jnp.pad(jnp.where(used, rows, 0), ((0, -num_rows % _side(num_rows)), (0, 0)))
    return jnp.where(used, _product(matmul_precision(), padded, weights, group_sizes)[:num_rows], 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(precision: str | None, rows: Array, weights: Array, group_sizes: Array) -> Array:
    return _by_platform(_kernels, precision, rows, weights, group_sizes)


def _forward(precision: str | None, *operands: Array) -> tuple[Array, tuple[Array, ...]]:
    return _product(precision, *operands), operands


def _backward(precision: str | None, saved: tuple[Array, ...], cotangent: Array) -> tuple[Array, Array, None]:
    return *_by_platform(_pullback, precision, *saved, cotangent), None


_product.defvjp(_forward, _backward)


def _kernels(rows: Array, weights: Array, group_sizes: Array, *, interpret: bool) -> Array:
    return gmm(rows, weights, group_sizes, rows.dtype, _tiling, interpret=interpret)


def _pullback(rows: Array, weights: Array, group_sizes: Array, cotangent: Array, *, interpret: bool) -> tuple[Array, Array]:
    # The product itself is not used and falls away when this is compiled.
    _, pullback = jax.vjp(lambda r, w: _kernels(r, w, group_sizes, interpret=interpret), rows, weights)
    return pullback(cotangent)


def _by_platform(function: Callable[..., Any], precision: str | None, *operands: Array) -> Any:
    """Compiled on TPU, interpreted on CPU: decided by the platform a program is lowered for, not by that of this machine."""
    branches = {platform: functools.partial(function, interpret=platform == "cpu") for platform in ("tpu", "cpu")}
    with jax.default_matmul_precision(precision):
        return jax.lax.platform_dependent(*operands, **branches)


def _tiling(rows: int, inner: int, outer: int) -> tuple[int, int, int]:
    """Sizes of a tile in rows, contracted width and output width of any of the three products."""
    return _side(rows), _side(inner), _side(outer)


def _side(size: int) -> int:
    """The largest of 512, 256 and 128 that leaves no more of the last tile empty than 128 does."""
    side = LARGEST
    while side > SMALLEST and -size % side > -size % SMALLEST:
        side //= 2
    return side
