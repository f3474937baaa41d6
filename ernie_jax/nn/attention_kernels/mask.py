"""Who sees whom. B batch, T query tokens, S keys."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionMask:
    """Query t sees key s when their segments are equal and not 0 and the key does not come later.

    Segment 0 is padding: a padded query sees nothing and its output is zero. The index of a token is its place in the row,
    which packing and left padding do not change; it is not its rotary position.

    Attributes:
      query_segment_ids, query_index: [B, T] int32.
      key_segment_ids, key_index: [B, S] int32.
    """

    query_segment_ids: jax.Array
    key_segment_ids: jax.Array
    query_index: jax.Array
    key_index: jax.Array

    @classmethod
    def causal(cls, segment_ids: jax.Array) -> AttentionMask:
        """Self attention over tokens with segments [B, T]."""
        segment_ids = segment_ids.astype(jnp.int32)
        index = jnp.broadcast_to(jnp.arange(segment_ids.shape[1], dtype=jnp.int32), segment_ids.shape)
        return cls(segment_ids, segment_ids, index, index)

    @classmethod
    def bidirectional(cls, segment_ids: jax.Array) -> AttentionMask:
        """Self attention within segments [B, T] in both directions: every query stands after the last key."""
        segment_ids = segment_ids.astype(jnp.int32)
        index = jnp.broadcast_to(jnp.arange(segment_ids.shape[1], dtype=jnp.int32), segment_ids.shape)
        return cls(segment_ids, segment_ids, jnp.full_like(index, segment_ids.shape[1]), index)

    @classmethod
    def cached(cls, query_segment_ids: jax.Array, key_segment_ids: jax.Array, index: jax.Array | int) -> AttentionMask:
        """New tokens that stand at slots index, index + 1, ... of a cache.

        Args:
          query_segment_ids: [B, T] segments of the new tokens.
          key_segment_ids: [B, S] segments of the cache's slots, those of the new tokens included; 0 is an empty or padded slot.
          index: slot of the first new token, a scalar or one a row [B].
        """
        first = jnp.asarray(index, jnp.int32)[..., None]
        query = first + jnp.arange(query_segment_ids.shape[1], dtype=jnp.int32)
        key = jnp.arange(key_segment_ids.shape[1], dtype=jnp.int32)
        return cls(
            query_segment_ids.astype(jnp.int32),
            key_segment_ids.astype(jnp.int32),
            jnp.broadcast_to(query, query_segment_ids.shape),
            jnp.broadcast_to(key, key_segment_ids.shape),
        )

    def last(self) -> AttentionMask:
        """The same with each row's last query alone."""
        return replace(self, query_segment_ids=self.query_segment_ids[:, -1:], query_index=self.query_index[:, -1:])

    def allowed(self) -> jax.Array:
        """[B, T, S] bool."""
        return allowed(self.query_segment_ids, self.query_index, self.key_segment_ids, self.key_index)


def allowed(query_segments: jax.Array, query_index: jax.Array, key_segments: jax.Array, key_index: jax.Array) -> jax.Array:
    """The rule itself on [B, t] queries and [B, s] keys: [B, t, s] bool."""
    same = (query_segments[:, :, None] == key_segments[:, None, :]) & (query_segments[:, :, None] != 0)
    return same & (key_index[:, None, :] <= query_index[:, :, None])
