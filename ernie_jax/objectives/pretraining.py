"""The pre-training objective: next-token loss plus router losses, as sums that add up over any split of a step.

E experts. What is differentiated is CE / scored tokens + sum over MoE layers of (c_aux L_aux + c_z L_z + c_orth L_orth); the
reported `loss` is the first term alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ernie_jax.models.inputs import TextInputs
from ernie_jax.models.text import TextModel
from ernie_jax.moe import RouterStats, load_balance_loss, orthogonal_loss, z_loss
from ernie_jax.objectives.next_token import chunked_cross_entropy


@dataclass(frozen=True, kw_only=True)
class RouterLossWeights:
    """Coefficients of the router losses; 0 leaves a loss out. `orthogonal_groups` is 1, or K for the grouped form."""

    aux: float = 0.0
    z: float = 0.0
    orthogonal: float = 0.0
    orthogonal_groups: int = 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepTotals:
    """What the whole optimiser step covers, known before its backward pass.

    Attributes:
      scored: number of tokens with a label.
      tokens: number of tokens that are not padding.
      top_k: for each MoE layer, [E] choices over the tokens that the balance loss takes its frequencies from, or None to
        take them from the tokens at hand.
      top_k_tokens: how many tokens `top_k` covers.
      share: the part of the step that is at hand (1 without accumulation), by which split-independent terms are weighted.
    """

    scored: jax.Array
    tokens: jax.Array
    share: jax.Array
    top_k: tuple[jax.Array, ...] | None = None
    top_k_tokens: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossParts:
    """Contributions of the tokens at hand; parts of a step add up to the step's values.

    `loss` is the cross-entropy, `aux`, `z` and `orthogonal` the uncoefficiented router losses averaged over layers.
    """

    loss: jax.Array
    aux: jax.Array
    z: jax.Array
    orthogonal: jax.Array
    stats: tuple[RouterStats, ...]


def pretraining_loss(
    model: TextModel, inputs: TextInputs, labels: jax.Array, totals: StepTotals, weights: RouterLossWeights
) -> tuple[jax.Array, LossParts]:
    """(what to differentiate, what to report) for the tokens at hand.

    Args:
      model: the model.
      inputs: tokens [B, T].
      labels: [B, T], shifted; negative is not scored.
      totals: of the whole step, so that contributions of its parts add up exactly.
      weights: coefficients of the router losses.
    """
    hidden, routers = model.hidden(inputs)
    total_ce, _ = chunked_cross_entropy(
        hidden, model.head_kernel, labels, model.dtypes, chunk=model.compute.loss_chunk, layout=model.layout
    )
    loss = total_ce / jnp.maximum(totals.scored, 1.0)
    zero = jnp.zeros((), jnp.float32)
    aux = z = orthogonal = zero
    for layer, router in enumerate(routers):
        stats = router.stats
        if totals.top_k is None:
            aux += load_balance_loss(stats.probability, stats.top_k, stats.tokens, totals.tokens)
        else:
            assert totals.top_k_tokens is not None
            aux += load_balance_loss(stats.probability, totals.top_k[layer], totals.top_k_tokens, totals.tokens)
        z += z_loss(stats.z_square, totals.tokens)
    for segment in model.decoder.segments:
        for decoder_layer in segment.layers:
            if decoder_layer.moe is not None and weights.orthogonal:
                gate = decoder_layer.moe.router.gate[...]
                orthogonal += jnp.sum(orthogonal_loss(gate, weights.orthogonal_groups)) * totals.share
    total = loss + weights.aux * aux + weights.z * z + weights.orthogonal * orthogonal
    layers = max(1, len(routers))
    frozen = jax.lax.stop_gradient(tuple(router.stats for router in routers))
    return total, LossParts(loss, aux / layers, z / layers, orthogonal / layers, frozen)
