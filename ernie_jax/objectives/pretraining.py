"""The pre-training objective: next-token loss plus router losses, as sums that add up over any split of a step.

E experts, B batch, T tokens. What is differentiated is

    sum of w CE / denominator + c_mtp mean over blocks of (sum of w CE_i / denominator_i)
    + sum over MoE layers and modalities of (c_aux L_aux + c_z L_z + c_orth L_orth)

where w weighs labels by the kind of their document (text alone, or with images) and the denominator is the number of scored
tokens or, token-balanced, the constant number of places of the step: documents with few labels then do not weigh more a label.
CE_i is the
loss of block i of multi-token prediction, if the model has any. The reported losses are means over scored tokens either way.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ernie_jax.models.inputs import TextInputs
from ernie_jax.models.text import TextModel
from ernie_jax.moe import RouterStats, load_balance_loss, orthogonal_loss, z_loss
from ernie_jax.moe.router import Router
from ernie_jax.objectives.multi_token import mtp_labels
from ernie_jax.objectives.next_token import chunked_cross_entropy
from ernie_jax.objectives.step_totals import StepTotals


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

    def factor(self, modality: int) -> float:
        """What all coefficients of a modality (0 text, 1 vision) are multiplied with."""
        return self.vision if modality else 1.0

    def token_loss(self, modality: int, aux: jax.Array | float, z: jax.Array | float) -> jax.Array | float:
        """What the balance and z losses of a modality add to the total."""
        return self.factor(modality) * (self.aux * aux + self.z * z)

    def gate_loss(self, orthogonal: jax.Array) -> jax.Array:
        """What the orthogonal losses [modalities] add to the total."""
        return self.orthogonal * sum((self.factor(i) * orthogonal[i] for i in range(len(orthogonal))), jnp.zeros((), jnp.float32))


@dataclass(frozen=True, kw_only=True)
class TokenWeights:
    """How labels count.

    Attributes:
      text, multimodal: factor of labels in documents of text alone, and with images or videos.
      token_balanced: divide by the constant number of places of the step instead of the scored tokens.
      mtp: factor of the mean loss of the blocks of multi-token prediction.
    """

    text: float = 1.0
    multimodal: float = 1.0
    token_balanced: bool = False
    mtp: float = 0.0

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
      mtp: mean over the blocks of multi-token prediction of their cross-entropy a scored token, without coefficient; None where
        none is trained.
    """

    loss: jax.Array
    modality_loss: jax.Array
    aux: jax.Array
    z: jax.Array
    orthogonal: jax.Array
    stats: tuple[RouterStats, ...]
    vision_stats: tuple[RouterStats, ...] = ()
    mtp: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadLosses:
    """What the head's losses are reported as: the fields `loss`, `modality_loss` and `mtp` of LossParts."""

    loss: jax.Array
    modality_loss: jax.Array
    mtp: jax.Array | None = None


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
    stream, routers = model.stream(inputs)
    total, losses = head_loss(model, stream, inputs, labels, totals, token_weights, document_kinds)
    stats = [tuple(router.stats for router in routers)]
    if totals.vision is not None:
        stats.append(tuple(router.vision for router in routers if router.vision is not None))
    sums = []
    for i, (modality, layers) in enumerate(zip(totals.modalities, stats, strict=True)):
        top_k = (None,) * len(layers) if modality.top_k is None else modality.top_k
        each = [token_losses_of(layer, modality.tokens, k) for layer, k in zip(layers, top_k, strict=True)]
        aux, z = (sum(values, start=jnp.zeros((), jnp.float32)) for values in zip(*each, strict=True)) if each else (0.0, 0.0)
        total += weights.token_loss(i, aux, z)
        sums.append((jnp.float32(aux), jnp.float32(z)))
    aux, z = (jnp.stack(values) for values in zip(*sums, strict=True))
    orthogonal = gate_losses(model, totals, weights)
    total += weights.gate_loss(orthogonal)
    return total, loss_parts(losses, aux, z, orthogonal, tuple(stats))


def head_loss(
    model: TextModel,
    stream: jax.Array,
    inputs: TextInputs,
    labels: jax.Array,
    totals: StepTotals,
    token_weights: TokenWeights,
    document_kinds: jax.Array | None,
) -> tuple[jax.Array, HeadLosses]:
    """(cross-entropies to differentiate, what to report) of hidden states [B, T, D] behind the decoder, before the final norm.

    Multi-token prediction is part of it where the model has its blocks, the weights count it and the totals know its labels.
    """

    def cross_entropy(hidden: jax.Array, labels: jax.Array, scored: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        weighted, losses = chunked_cross_entropy(
            hidden,
            model.head_kernel,
            labels,
            model.dtypes,
            chunk=model.compute.loss_chunk,
            layout=model.layout,
            weights=token_weights.of(document_kinds),
        )
        denominator = totals.places if token_weights.token_balanced else scored
        return weighted / jnp.maximum(denominator, 1.0), jnp.sum(losses) / jnp.maximum(scored, 1.0), losses

    total, mean, losses = cross_entropy(model.norm(stream), labels, totals.scored)
    by_document = _by_document(losses, document_kinds, totals)
    if model.mtp is None or totals.mtp_scored is None or not token_weights.mtp:
        return total, HeadLosses(mean, by_document)
    further = jnp.zeros((), jnp.float32)
    hidden = model.further_hidden(stream, inputs)
    for i in range(model.mtp.depth):
        own = mtp_labels(labels, inputs.segment_ids, i)
        added, reported, _ = cross_entropy(hidden[i], own, totals.mtp_scored[i])
        total += token_weights.mtp / model.mtp.depth * added
        further += reported / model.mtp.depth
    return total, HeadLosses(mean, by_document, further)


def token_losses_of(stats: RouterStats, tokens: jax.Array, top_k: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Balance and z loss of layers of one modality.

    Args:
      stats: of the tokens at hand, with or without a leading axis of layers.
      tokens: of this modality in the whole step.
      top_k: [..., E] choices over the step that frequencies are taken from, None for those of the tokens at hand.

    Returns:
      Two arrays of the leading axis.
    """
    counts, counted = (stats.top_k, stats.tokens[..., None]) if top_k is None else (top_k, tokens)
    return load_balance_loss(stats.probability, counts, counted, tokens), z_loss(stats.z_square, tokens)


def gate_losses(model: TextModel, totals: StepTotals, weights: RouterLossWeights) -> jax.Array:
    """[modalities] orthogonal losses summed over layers, by the share of the step; of modalities that the step has.

    Where the loss has no coefficient, zeros.
    """
    losses = []
    for i, modality in enumerate(totals.modalities):
        loss = jnp.zeros((), jnp.float32)
        if weights.orthogonal:
            groups = 1 if i else weights.orthogonal_groups
            share = totals.share * (modality.tokens > 0)
            loss += sum(jnp.sum(orthogonal_loss(router.gate[...], groups)) for router in _routers(model, vision=i > 0)) * share
        losses.append(loss)
    return jnp.stack(losses)


def loss_parts(
    losses: HeadLosses,
    aux: jax.Array,
    z: jax.Array,
    orthogonal: jax.Array,
    stats: tuple[tuple[RouterStats, ...], ...],
) -> LossParts:
    """What is reported, of sums over layers [modalities] and the statistics of each modality's layers."""
    layers = jnp.array([max(1, len(some)) for some in stats], jnp.float32)
    aux, z, orthogonal = (jax.lax.stop_gradient(sums / layers) for sums in (aux, z, orthogonal))
    frozen = jax.lax.stop_gradient(stats)
    vision = frozen[1] if len(frozen) > 1 else ()
    return LossParts(losses.loss, losses.modality_loss, aux, z, orthogonal, frozen[0], vision, losses.mtp)


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
