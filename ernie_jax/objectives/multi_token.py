"""What the blocks of multi-token prediction are scored against. B batch, T tokens, N blocks."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ernie_jax.models.mtp import shift_left
from ernie_jax.objectives.next_token import IGNORE


def mtp_labels(labels: jax.Array, segment_ids: jax.Array, block: int) -> jax.Array:
    """Labels of one block: those that stand `block + 1` places further on in the same document.

    The last places of a document, and of a row whose document goes on in another, are not scored.

    Args:
      labels: [B, T], of the next token; negative is not scored.
      segment_ids: [B, T], the document of each token, 0 for padding.
      block: 0 for the first.

    Returns:
      [B, T], -100 where nothing is scored.
    """
    places = block + 1
    within = jnp.arange(labels.shape[1]) < labels.shape[1] - places
    same = (shift_left(segment_ids, places) == segment_ids) & (segment_ids != 0)
    return jnp.where(within & same, shift_left(labels, places), IGNORE)


def mtp_scored(labels: jax.Array, segment_ids: jax.Array, blocks: int) -> jax.Array:
    """[N] float32, how many places of the given rows each block is scored at."""
    return jnp.stack([jnp.sum(mtp_labels(labels, segment_ids, i) >= 0, dtype=jnp.float32) for i in range(blocks)])
