"""The key/value cache. R repeats of a stack of layers, B batch, S slots, hk kv heads, d head width.

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
    """Rotated keys and values of a stack of layers, [R, B, S, hk, d] each, seen from one of them.

    The whole stack goes from layer to layer and each writes its slots into it in place; cutting out a layer's part and putting
    it back would copy the cache for every token.

    Attributes:
      keys, values: of all layers of the stack.
      layer: int32, the layer that reads and writes; None between passes.
    """

    keys: jax.Array
    values: jax.Array
    layer: jax.Array | None = None

    def at(self, layer: jax.Array | None) -> LayerCache:
        """The same cache seen from another layer."""
        return replace(self, layer=layer)

    def write(self, keys: jax.Array, values: jax.Array, index: jax.Array) -> LayerCache:
        """A cache with `keys`, `values` [B, T, hk, d] at slots index .. index + T - 1 of this layer."""
        assert self.layer is not None
        start = (self.layer, 0, index, 0, 0)
        return replace(
            self,
            keys=jax.lax.dynamic_update_slice(self.keys, keys[None].astype(self.keys.dtype), start),
            values=jax.lax.dynamic_update_slice(self.values, values[None].astype(self.values.dtype), start),
        )

    def read(self) -> tuple[jax.Array, jax.Array]:
        """Keys and values [B, S, hk, d] of this layer."""
        assert self.layer is not None
        return (
            jax.lax.dynamic_index_in_dim(self.keys, self.layer, keepdims=False),
            jax.lax.dynamic_index_in_dim(self.values, self.layer, keepdims=False),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Caches of all layers, with what is needed to mask and to continue.

    Attributes:
      segments: for each decoder segment, one LayerCache a layer of its unit: arrays [repeats, B, S, hk, d].
      segment_ids: [B, S] int32, 0 where a slot is empty or padding.
      index: int32 scalar, the next slot to write.
      offset: [B] int32, position of a next token minus its slot; not zero behind images and videos, whose positions overlap.
    """

    segments: tuple[tuple[LayerCache, ...], ...]
    segment_ids: jax.Array
    index: jax.Array
    offset: jax.Array

    @classmethod
    def create(cls, config: ModelConfig, batch_size: int, length: int, dtype: DTypeLike) -> KVCache:
        """An empty cache of `length` slots."""

        def empty(repeats: int) -> LayerCache:
            shape = (repeats, batch_size, length, config.num_key_value_heads, config.head_dim)
            return LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

        segments = tuple(tuple(empty(s.repeats) for _ in s.unit) for s in segments_of(config))
        segment_ids, offset = jnp.zeros((batch_size, length), jnp.int32), jnp.zeros((batch_size,), jnp.int32)
        return cls(segments, segment_ids, jnp.zeros((), jnp.int32), offset)

    @property
    def length(self) -> int:
        """Number of slots."""
        return self.segment_ids.shape[1]

    def advance(self, count: int) -> KVCache:
        """Move the write position past `count` tokens."""
        return replace(self, index=self.index + count)

    def continue_at(self, positions: jax.Array) -> KVCache:
        """The same with the position [B] of each row's next token."""
        return replace(self, offset=(positions - self.index).astype(jnp.int32))

    def admit(self, segment_ids: jax.Array) -> KVCache:
        """Mark the slots of T new tokens with their segments [B, T]; keys and values follow layer by layer."""
        marked = jax.lax.dynamic_update_slice_in_dim(self.segment_ids, segment_ids.astype(jnp.int32), self.index, axis=1)
        return replace(self, segment_ids=marked)
