"""The key/value cache of one stack of layers. L layers, B batch, S slots, hk kv heads, d head width.

Slots follow the order in which tokens entered; which row's slots hold real tokens is told by `segment_ids` (0 = padding or
empty), so rows of different length share one write position.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ernie_jax.config.model import ModelConfig
from ernie_jax.config.segments import segments_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """Rotated keys and values of one layer (or, with a leading axis, of a stack)."""

    keys: jax.Array
    values: jax.Array

    def write(self, keys: jax.Array, values: jax.Array, index: jax.Array) -> LayerCache:
        """A cache with `keys`, `values` [B, T, hk, d] at slots index .. index + T - 1."""
        return LayerCache(
            jax.lax.dynamic_update_slice_in_dim(self.keys, keys.astype(self.keys.dtype), index, axis=1),
            jax.lax.dynamic_update_slice_in_dim(self.values, values.astype(self.values.dtype), index, axis=1),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Caches of all layers, with what is needed to mask and to continue.

    Attributes:
      segments: for each decoder segment, one LayerCache a layer of its unit: arrays [repeats, B, S, hk, d].
      segment_ids: [B, S] int32, 0 where a slot is empty or padding.
      index: int32 scalar, the next slot to write.
    """

    segments: tuple[tuple[LayerCache, ...], ...]
    segment_ids: jax.Array
    index: jax.Array

    @classmethod
    def create(cls, config: ModelConfig, batch_size: int, length: int, dtype: DTypeLike) -> KVCache:
        """An empty cache of `length` slots."""

        def empty(repeats: int) -> LayerCache:
            shape = (repeats, batch_size, length, config.num_key_value_heads, config.head_dim)
            return LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

        segments = tuple(tuple(empty(s.repeats) for _ in s.unit) for s in segments_of(config))
        return cls(segments, jnp.zeros((batch_size, length), jnp.int32), jnp.zeros((), jnp.int32))

    @property
    def length(self) -> int:
        """Number of slots."""
        return self.segment_ids.shape[1]

    def advance(self, count: int) -> KVCache:
        """Move the write position past `count` tokens."""
        return replace(self, index=self.index + count)

    def admit(self, segment_ids: jax.Array) -> KVCache:
        """Mark the slots of T new tokens with their segments [B, T]; keys and values follow layer by layer."""
        marked = jax.lax.dynamic_update_slice_in_dim(self.segment_ids, segment_ids.astype(jnp.int32), self.index, axis=1)
        return replace(self, segment_ids=marked)
