"""The pre-training objective: next-token loss plus router losses, as sums that add up over any split of a step.

E experts, B batch, T tokens. What is differentiated is

    sum of w CE / denominator + sum over MoE layers and modalities of (c_aux L_aux + c_z L_z + c_orth L_orth)

where w weighs labels by the kind of their document (text alone, or with images) and the denominator is the number of scored
tokens or, token-balanced, the constant number of places of the step: documents with few labels then do not weigh more a label.
The reported losses are means over scored tokens either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ernie_jax.models.inputs import TextInputs
from ernie_jax.models.text import TextModel
from ernie_jax.moe import RouterStats, load_balance_loss, orthogonal_loss, z_loss
from ernie_jax.moe.router import Router
from ernie_jax.objectives.next_token import chunked_cross_entropy
from ernie_jax.objectives.step_totals import ModalityTotals, StepTotals


@dataclass(frozen=True, kw_only=True)
class RouterLossWeights:
    """Coefficients of the router losses; 0 leaves a loss out.

    Attributes:
      aux, z, orthogonal: of the text experts' router.
      orthogonal_groups: 1, or K for the grouped form; the vision gate always has 1, as in the reference.
      vision: what the vision experts' coefficients are times the text experts'.
    """

    aux: float = 0.0
    z: float = 0.0
    orthogonal: float = 0.0
    orthogonal_groups: int = 1
    vision: float = 1.0


@dataclass(frozen=True, kw_only=True)
class TokenWeights:
    """How labels count.

    Attributes:
      text, multimodal: factor of labels in documents of text alone, and with images or videos.
      token_balanced: divide by the constant number of places of the step instead of the scored tokens.
    """

    text: float = 1.0
    multimodal: float = 1.0
    token_balanced: bool = False

    def of(self, document_kinds: jax.Array | None) -> jax.Array | None:
        """[B, T] factors, None where all are 1."""
        if document_kinds is None or self.text == self.multimodal == 1.0:
            return None
        return jnp.where(document_kinds != 0, jnp.float32(self.multimodal), jnp.float32(self.text))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossParts:
    """Contributions of the tokens at hand; parts of a step add up to the step's values.

    Attributes:
      loss: cross-entropy a scored token, over all.
      modality_loss: [modalities] the same in documents of text alone, and with images.
      aux, z, orthogonal: [modalities] router losses without coefficients, averaged over layers.
      stats: for each MoE layer, of the text experts.
      vision_stats: of the vision experts, empty without.
    """

    loss: jax.Array
    modality_loss: jax.Array
    aux: jax.Array
    z: jax.Array
    orthogonal: jax.Array
    stats: tuple[RouterStats, ...]
    vision_stats: tuple[RouterStats, ...] = ()


def pretraining_loss(
    model: TextModel,
    inputs: TextInputs,
    labels: jax.Array,
    totals: StepTotals,
    weights: RouterLossWeights,
    token_weights: TokenWeights = TokenWeights(),
    document_kinds: jax.Array | None = None,
) -> tuple[jax.Array, LossParts]:
    """(what to differentiate, what to report) for the tokens at hand.

    Args:
      model: the model.
      inputs: tokens [B, T], and the images among them.
      labels: [B, T], shifted; negative is not scored.
      totals: of the whole step, so that contributions of its parts add up exactly.
      weights: coefficients of the router losses.
      token_weights: how labels count.
      document_kinds: [B, T] 0 in documents of text alone, 1 in documents with images; None for text alone.
    """
    hidden, routers = model.hidden(inputs)
    weighted, losses = chunked_cross_entropy(
        hidden,
        model.head_kernel,
        labels,
        model.dtypes,
        chunk=model.compute.loss_chunk,
        layout=model.layout,
        weights=token_weights.of(document_kinds),
    )
    denominator = totals.places if token_weights.token_balanced else totals.scored
    total = weighted / jnp.maximum(denominator, 1.0)
    stats = [tuple(router.stats for router in routers)]
    if totals.vision is not None:
        stats.append(tuple(router.vision for router in routers if router.vision is not None))
    gates = [_routers(model, vision=i > 0) for i in range(len(stats))]
    reported = []
    for i, (of_modality, layers, own_gates) in enumerate(zip(totals.modalities, stats, gates, strict=True)):
        groups = 1 if i else weights.orthogonal_groups
        aux, z = _token_losses(layers, of_modality)
        # Once for each modality that the step has.
        share = totals.share * (of_modality.tokens > 0)
        orthogonal = jnp.zeros((), jnp.float32)
        if weights.orthogonal:
            orthogonal += sum(jnp.sum(orthogonal_loss(router.gate[...], groups)) for router in own_gates) * share
        factor = weights.vision if i else 1.0
        total += factor * (weights.aux * aux + weights.z * z + weights.orthogonal * orthogonal)
        reported.append(jnp.stack([aux, z, orthogonal]) / max(1, len(layers)))
    aux, z, orthogonal = jax.lax.stop_gradient(jnp.stack(reported, axis=1))
    frozen = jax.lax.stop_gradient(tuple(stats))
    return total, LossParts(
        jnp.sum(losses) / jnp.maximum(totals.scored, 1.0),
        _by_document(losses, document_kinds, totals),
        aux,
        z,
        orthogonal,
        frozen[0],
        frozen[1] if len(frozen) > 1 else (),
    )


def _token_losses(layers: Sequence[RouterStats], totals: ModalityTotals) -> tuple[jax.Array, jax.Array]:
    """Balance and z loss of one modality, summed over layers."""
    aux = z = jnp.zeros((), jnp.float32)
    for i, stats in enumerate(layers):
        if totals.top_k is None:
            aux += load_balance_loss(stats.probability, stats.top_k, stats.tokens, totals.tokens)
        else:
            aux += load_balance_loss(stats.probability, totals.top_k[i], totals.tokens, totals.tokens)
        z += z_loss(stats.z_square, totals.tokens)
    return aux, z


def _routers(model: TextModel, *, vision: bool) -> list[Router]:
    """The routers of one modality, one for each place of a stack of layers."""
    moes = [layer.moe for segment in model.decoder.segments for layer in segment.layers if layer.moe is not None]
    found = [moe.vision_router if vision else moe.router for moe in moes]
    return [router for router in found if router is not None]


def _by_document(losses: jax.Array, document_kinds: jax.Array | None, totals: StepTotals) -> jax.Array:
    """[modalities] mean loss of the labels in documents of text alone, and with images."""
    if document_kinds is None or totals.vision is None:
        return jnp.sum(losses)[None] / jnp.maximum(totals.scored, 1.0)
    mixed = document_kinds != 0
    sums = jnp.stack([jnp.sum(jnp.where(mixed, 0, losses)), jnp.sum(jnp.where(mixed, losses, 0))])
    return sums / jnp.maximum(jnp.stack([totals.text.scored, totals.vision.scored]), 1.0)
