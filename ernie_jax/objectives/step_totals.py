"""Counts over a whole optimiser step, by which the losses of its parts are divided. B batch, T tokens, E experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from ernie_jax.objectives.multi_token import mtp_scored


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModalityTotals:
    """Of one modality, over the whole optimiser step.

    Attributes:
      tokens: valid tokens that go to its experts.
      scored: labels in documents of text alone (text), or with images (vision).
      top_k: for each MoE layer, [E] choices that the balance loss takes its frequencies from, or None to take them from the
        tokens at hand.
    """

    tokens: jax.Array
    scored: jax.Array
    top_k: tuple[jax.Array, ...] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepTotals:
    """What the whole optimiser step covers, known before its backward pass.

    Attributes:
      scored: number of tokens with a label.
      places: number of places B T of the step, padding included.
      share: the part of the step that is at hand (1 without accumulation), by which split-independent terms are weighted.
      text, vision: by modality; None for a model or a batch of text alone.
      mtp_scored: [N], tokens with a label of each block of multi-token prediction; None where none is trained.
    """

    scored: jax.Array
    places: jax.Array
    share: jax.Array
    text: ModalityTotals
    vision: ModalityTotals | None = None
    mtp_scored: jax.Array | None = None

    @property
    def modalities(self) -> tuple[ModalityTotals, ...]:
        """Text and, where there is one, vision."""
        return (self.text,) if self.vision is None else (self.text, self.vision)

    def with_choices(self, text: tuple[jax.Array, ...], vision: tuple[jax.Array, ...]) -> StepTotals:
        """With the choices [E] of each MoE layer over the whole step, by modality."""
        return replace(
            self,
            text=replace(self.text, top_k=text),
            vision=None if self.vision is None else replace(self.vision, top_k=vision),
        )

    @classmethod
    def of(
        cls,
        labels: jax.Array,
        segment_ids: jax.Array,
        modality_ids: jax.Array | None = None,
        document_kinds: jax.Array | None = None,
        *,
        share: float = 1.0,
        mtp_blocks: int = 0,
    ) -> StepTotals:
        """Counted in the arrays [B, T] of a whole step, for so many blocks of multi-token prediction."""
        scored, valid = labels >= 0, segment_ids != 0

        def count(mask: jax.Array) -> jax.Array:
            return jnp.sum(mask, dtype=jnp.float32)

        mixed = jnp.zeros_like(scored) if document_kinds is None else document_kinds != 0
        vision = None if modality_ids is None else ModalityTotals(count(valid & (modality_ids != 0)), count(scored & mixed))
        tokens = valid if modality_ids is None else valid & (modality_ids == 0)
        text = ModalityTotals(count(tokens), count(scored & ~mixed))
        further = mtp_scored(labels, segment_ids, mtp_blocks) if mtp_blocks else None
        return cls(count(scored), jnp.float32(labels.size), jnp.float32(share), text, vision, further)
