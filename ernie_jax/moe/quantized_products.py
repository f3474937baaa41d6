"""Products of sorted rows with their group's weights, both in FP8: emulated exactly, with every backend.

R rows, E groups, D contracted width, F output width, L layers. Operands are dequantised and multiplied in float32 at the
highest precision, so the result is that of the FP8 numbers and scales up to the order of a float32 sum. Backward passes are the
caller's, who knows what to quantise; nothing here is differentiable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ernie_jax.moe.grouped_matmul import grouped_matmul, resolve_backend
from ernie_jax.moe.grouped_matmul.blocks import Groups
from ernie_jax.moe.grouped_matmul.quantized_blocks import quantized_block_product
from ernie_jax.nn.fp8 import Quantized, announce_emulation

Array = jax.Array


class RowGroups(NamedTuple):
    """Which rows are whose: sizes [E], and the first row of group 0, None for 0."""

    sizes: Array
    first_row: Array | None = None

    @property
    def first(self) -> Array:
        """The first row of group 0."""
        return jnp.int32(0) if self.first_row is None else self.first_row.astype(jnp.int32)

    def mask(self, num_rows: int) -> Array:
        """[R] bool: the rows that belong to a group."""
        row = jnp.arange(num_rows)
        return (row >= self.first) & (row < self.first + self.sizes.sum())


@dataclass(frozen=True)
class GroupedProducts:
    """How to multiply: `backend` and `sets` as in `grouped_matmul`."""

    backend: str = "auto"
    sets: int = 1

    def rows_product(self, rows: Quantized, kept: Quantized, layer: Array, groups: RowGroups, side: int, dtype: DTypeLike) -> Array:
        """Each row times the weights W of its group (side 0), or times their transpose (side 1); zero in spare rows.

        Args:
          rows: [R, ...], tiles along the last axis; the other axes are contracted too.
          kept: weights of all layers [L, E, D, ...], of which `layer` is used.
          layer: scalar.
          groups: which rows are whose.
          side: 0 contracts D, 1 the axes behind it.
          dtype: of the result.

        Returns:
          [R, F], F the axes of W that are not contracted, as one.
        """
        announce_emulation()
        if resolve_backend(self.backend) == "blocks":
            blocks = Groups(groups.sizes.astype(jnp.int32), groups.first)
            return quantized_block_product(rows, kept, layer, blocks, side, self.sets, dtype)
        values, scales = (jax.lax.dynamic_index_in_dim(a, layer, 0, keepdims=False) for a in (kept.values, kept.scales))
        own = Quantized(values, scales, kept.tile)
        weights = own.dequantize().reshape(*own.values.shape[:2], -1)
        x = rows.dequantize().reshape(rows.values.shape[0], -1)
        with jax.default_matmul_precision("highest"):
            out = self._product(x, weights if side == 0 else weights.swapaxes(1, 2), groups)
        return out.astype(dtype)

    def weights_product(self, rows: Array, cotangent: Array, groups: RowGroups) -> Array:
        """[E, D, F]: each group's sum of outer products of rows [R, D] and cotangents [R, F], in their dtype."""
        shape = groups.sizes.size, rows.shape[1], cotangent.shape[1]
        # The gradient of a product that is linear in the weights: their values do not matter, and are never made.
        with jax.default_matmul_precision("highest"):
            _, pullback = jax.vjp(lambda weights: self._product(rows, weights, groups), jnp.zeros(shape, rows.dtype))
            (out,) = pullback(cotangent)
        return out

    def _product(self, rows: Array, weights: Array, groups: RowGroups) -> Array:
        return grouped_matmul(rows, weights, groups.sizes, backend=self.backend, first_row=groups.first_row, sets=self.sets)
