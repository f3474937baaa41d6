"""The gated MLPs of one set of experts in FP8, forward and backward. R rows, D model, F width, E experts, L layers.

Six products, as ERNIE 4.5 trains (`docs/decisions.md` has the recipe): hidden = x Wgu, y = a Wd with a = gated(hidden) times the
row's mixing weight, dX and dA in FP8; dWgu and dWd in FP8 or of the kept inputs in the compute format. What the backward pass
keeps is FP8 with its scales: x (tag `expert_in`) and hidden (tag `expert_gate_up`), from which a is made again.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ernie_jax.config.compute import Fp8Config
from ernie_jax.moe.experts import ExpertWeights, QuantizedExperts
from ernie_jax.moe.permute import no_gradient
from ernie_jax.moe.quantized_products import GroupedProducts, RowGroups
from ernie_jax.nn.activation import gated_rows
from ernie_jax.nn.fp8 import E4M3, FP8_DTYPES, TILE, Fp8Counts, Quantized, count_losses, quantize, requantized_by_tokens

Array = jax.Array

# The operands of the forward products, in the order of what is counted about them.
OPERANDS = ("gate_up", "down")


@dataclass(frozen=True)
class Fp8Experts:
    """What is static about the products.

    Attributes:
      config: formats of the gradients, and whether the weights' gradient is a product in FP8.
      products: how rows are multiplied with their group's weights.
      hidden_act: activation of the gate.
    """

    config: Fp8Config
    products: GroupedProducts
    hidden_act: str

    def __call__(
        self, rows: Array, row_weights: Array, weights: ExpertWeights, kept: QuantizedExperts, groups: RowGroups
    ) -> tuple[Array, Fp8Counts]:
        """rows [R, D] through their experts.

        Args:
          rows: sorted by expert.
          row_weights: [R] mixing weights.
          weights: of this layer, in the dtype of rows, which the gradient is of; their values are not read.
          kept: the values in FP8.
          groups: which rows are whose.

        Returns:
          ([R, D], weighted, zero in spare rows; what the casts of the two inputs lost, an entry for each of `OPERANDS`).
        """
        return _experts(self, rows, row_weights, weights, kept, groups)

    def _operand(self, rows: Array) -> Quantized:
        return quantize(rows, E4M3, (TILE,))

    def _gradient(self, rows: Array) -> Quantized:
        return quantize(rows, FP8_DTYPES[self.config.gradient_format], (TILE,))

    def _weighted(self, hidden: Array, row_weights: Array) -> Array:
        return gated_rows(hidden, row_weights, self.hidden_act)

    def _weight_gradient(self, x: Quantized, cotangent: Array, groups: RowGroups) -> Array:
        """[E, D, F] of the product of x [R, D] and weights, cotangent [R, F]."""
        if not self.config.weight_gradient:
            return self.products.weights_product(x.dequantize(cotangent.dtype), cotangent, groups)
        formats = E4M3, FP8_DTYPES[self.config.gradient_format]
        factors = (x.dequantize(), cotangent)
        x_tiles, dy_tiles = (requantized_by_tokens(a, groups.sizes, groups.first, f) for a, f in zip(factors, formats, strict=True))
        return self.products.weights_product(x_tiles, dy_tiles, groups)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _experts(
    static: Fp8Experts, rows: Array, row_weights: Array, weights: ExpertWeights, kept: QuantizedExperts, groups: RowGroups
) -> tuple[Array, Fp8Counts]:
    return _forward(static, rows, row_weights, weights, kept, groups)[0]


def _forward(
    static: Fp8Experts, rows: Array, row_weights: Array, weights: ExpertWeights, kept: QuantizedExperts, groups: RowGroups
) -> tuple[tuple[Array, Fp8Counts], Any]:
    num_rows, dtype, product = rows.shape[0], rows.dtype, static.products.rows_product
    x = static._operand(rows)
    hidden = product(x, kept.gate_up, kept.index, groups, 0, dtype).reshape(num_rows, 2, -1)
    acted = static._weighted(hidden, row_weights)
    a = static._operand(acted)
    out = product(a, kept.down, kept.index, groups, 0, dtype)
    own = groups.mask(num_rows)
    counts = jax.tree.map(lambda *two: jnp.stack(two), count_losses(rows, x, own), count_losses(acted, a, own))
    x, hidden_kept = checkpoint_name(x, "expert_in"), checkpoint_name(static._operand(hidden), "expert_gate_up")
    return (out, counts), (x, hidden_kept, row_weights, kept, groups)


def _backward(static: Fp8Experts, saved: Any, cotangents: tuple[Array, Any]) -> tuple[Any, ...]:
    x, hidden_kept, row_weights, kept, groups = saved
    d_out, _ = cotangents
    num_rows, dtype, product = d_out.shape[0], d_out.dtype, static.products.rows_product
    hidden = hidden_kept.dequantize()
    acted, through_act = jax.vjp(static._weighted, hidden, row_weights)
    d_acted = product(static._gradient(d_out), kept.down, kept.index, groups, 1, dtype)
    d_hidden, d_row_weights = through_act(d_acted.astype(acted.dtype))
    d_hidden = d_hidden.astype(dtype)
    d_rows = product(static._gradient(d_hidden), kept.gate_up, kept.index, groups, 1, dtype)
    d_gate_up = static._weight_gradient(x, d_hidden.reshape(num_rows, -1), groups)
    d_down = static._weight_gradient(static._operand(acted), d_out, groups)
    d_gate_up = d_gate_up.reshape(*d_gate_up.shape[:2], 2, -1)
    d_weights = ExpertWeights(d_gate_up.astype(dtype), d_down.astype(dtype))
    return d_rows, d_row_weights, d_weights, None, jax.tree.map(no_gradient, groups)


_experts.defvjp(_forward, _backward)
