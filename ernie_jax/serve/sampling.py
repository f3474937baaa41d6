"""Choosing the next token. B rows, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How one row's tokens are drawn.

    Attributes:
      temperature: 0 takes the most likely token; otherwise logits are divided by it.
      top_k: draw among this many most likely tokens; 0, or more than the vocabulary, is all.
      top_p: draw among the fewest most likely tokens whose probability reaches this; at least one token stays.
      seed: of this row's draws, which depend on nothing else but the logits.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature}; expected 0 (most likely token) or a positive number")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}; expected 0 (all tokens) or a positive number of tokens")
        if not 0 <= self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}; expected a probability between 0 and 1")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingRows:
    """The settings of each row of a batch, [B] each."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    seed: jax.Array

    @classmethod
    def of(cls, rows: Sequence[SamplingConfig]) -> SamplingRows:
        """One batch from one configuration a row."""
        return cls(
            jnp.asarray(np.array([r.temperature for r in rows], np.float32)),
            jnp.asarray(np.array([min(r.top_k, np.iinfo(np.int32).max) for r in rows], np.int32)),
            jnp.asarray(np.array([r.top_p for r in rows], np.float32)),
            jnp.asarray(np.array([r.seed % 2**32 for r in rows], np.uint32)),
        )


def kept_tokens(logits: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Which tokens may be drawn: temperature first, then top-k, then top-p of what top-k left.

    Args:
      logits: [B, V] float32.
      temperature, top_k, top_p: [B].

    Returns:
      [B, V] bool, at least one token a row.
    """
    vocabulary = logits.shape[-1]
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)[:, None]
    order = jnp.argsort(-scaled, axis=-1, stable=True)
    rank = jnp.argsort(order, axis=-1)
    among_k = rank < jnp.where(top_k > 0, top_k, vocabulary)[:, None]
    probabilities = jax.nn.softmax(jnp.where(among_k, scaled, -jnp.inf), axis=-1)
    sorted_probabilities = jnp.take_along_axis(probabilities, order, axis=-1)
    before = jnp.cumsum(sorted_probabilities, axis=-1) - sorted_probabilities
    # A token stays while those before it have not reached top_p; 1 keeps all, whatever rounding makes of the sum.
    stays = (before < top_p[:, None]) | (top_p[:, None] >= 1)
    stays = stays.at[:, 0].set(True)
    return among_k & jnp.take_along_axis(stays, rank, axis=-1)


def sample(logits: jax.Array, rows: SamplingRows, step: jax.Array) -> jax.Array:
    """Next token of each row.

    Args:
      logits: [B, V] float32.
      rows: settings of each row.
      step: scalar, how many tokens were drawn before; with the row's seed it decides the draw.

    Returns:
      [B] int32.
    """
    likely = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw(_: None) -> jax.Array:
        kept = kept_tokens(logits, rows.temperature, rows.top_k, rows.top_p)
        scaled = logits / jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
        keys = jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(seed), step))(rows.seed)
        drawn = jax.vmap(jax.random.categorical)(keys, jnp.where(kept, scaled, -jnp.inf))
        return jnp.where(rows.temperature > 0, drawn.astype(jnp.int32), likely)

    # Sorting the vocabulary is most of the work, and greedy batches need none of it.
    return jax.lax.cond(jnp.any(rows.temperature > 0), draw, lambda _: likely, None)
