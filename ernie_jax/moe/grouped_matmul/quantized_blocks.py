"""The loop of `blocks` over operands in FP8: one group's weights and one block's rows are dequantised at a time.

R rows, E groups, L layers, D contracted width, F output width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ernie_jax.moe.grouped_matmul import blocks
from ernie_jax.moe.grouped_matmul.contraction import contract
from ernie_jax.nn.fp8 import Quantized

Array = jax.Array


def quantized_block_product(
    rows: Quantized, kept: Quantized, layer: Array, groups: blocks.Groups, side: int, sets: int, dtype: DTypeLike
) -> Array:
    """Rows [R, ...] times the weights kept[layer] [E, D, ...] of their group (side 0) or their transpose (side 1) -> [R, F].

    Summed in float32 at the highest precision; zero in spare rows, whatever they hold.
    """
    num_rows, dtype = rows.values.shape[0], jnp.dtype(dtype)
    inner = kept.values.shape[2:]
    width = inner[0] if side else kept.values[0, 0, 0].size
    row_bits, kept_bits = blocks.as_bits(rows.values), blocks.as_bits(kept.values)
    out = blocks.as_bits(jnp.zeros((num_rows, width), dtype))
    if out.size == 0 or groups.sizes.size == 0:
        return blocks.as_floats(out, dtype)

    def group(expert: Array, start: Array, size: Array, out: Array) -> Array:
        def of_group(x: Array) -> Array:
            origin: list[Array | int] = [layer, expert, *[0] * (x.ndim - 2)]
            return jax.lax.dynamic_slice(x, origin, (1, 1, *x.shape[2:])).reshape(x.shape[2:])

        values = blocks.as_floats(of_group(kept_bits), kept.values.dtype)
        weight = Quantized(values, of_group(kept.scales), kept.tile).dequantize().reshape(inner[0], -1)

        def block(top: Array, index: Array, first: Array, out: Array) -> Array:
            x, scales = (jax.lax.dynamic_slice_in_dim(a, top, index.size) for a in (row_bits, rows.scales))
            x = Quantized(blocks.as_floats(x, rows.values.dtype), scales, rows.tile).dequantize().reshape(index.size, -1)
            y = contract(x, weight, (1, side), "highest").astype(dtype)
            old = jax.lax.dynamic_slice_in_dim(out, top, index.size)
            new = jnp.where(index < first, old, jnp.where(index < start + size, blocks.as_bits(y), 0))
            return jax.lax.dynamic_update_slice_in_dim(out, new, top, 0)

        return blocks.for_blocks(start, size, num_rows, heights, block, out)

    heights = blocks.block_heights(num_rows, sets * groups.sizes.size)
    return blocks.as_floats(blocks.for_groups(groups, group, out), dtype)
