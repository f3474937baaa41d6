"""Checked inputs of a text model. B batch, T tokens, S cache slots."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from ernie_jax.config.model import ModelConfig
from ernie_jax.nn.attention_kernels import AttentionMask
from ernie_jax.nn.kv_cache import KVCache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TextInputs:
    """Tokens with their segments and positions, all [B, T] int32; segment 0 is padding."""

    input_ids: jax.Array
    segment_ids: jax.Array
    position_ids: jax.Array

    @property
    def modality(self) -> jax.Array | None:
        """[B, T] bool, true where a token goes to the vision experts; None where all go to the text experts."""
        return None

    def mask(self, cache: KVCache | None) -> AttentionMask:
        """Who sees whom: within the tokens, or over the slots of a cache that has admitted them."""
        if cache is None:
            return AttentionMask.causal(self.segment_ids)
        return AttentionMask.cached(self.segment_ids, cache.segment_ids, cache.index)


def _concrete(x: object) -> bool:
    return not isinstance(x, jax.core.Tracer)


def _checked(name: str, value: jax.Array | None, shape: tuple[int, ...]) -> jax.Array | None:
    if value is None:
        return None
    if tuple(value.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; expected {shape}, the shape of input_ids")
    if not (jnp.issubdtype(value.dtype, jnp.integer) or value.dtype == jnp.bool_):
        raise ValueError(f"{name} has dtype {value.dtype}; expected integers or booleans")
    return jnp.asarray(value, jnp.int32)


def text_inputs(
    config: ModelConfig,
    input_ids: jax.Array,
    attention_mask: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    position_ids: jax.Array | None = None,
    cache: KVCache | None = None,
) -> TextInputs:
    """Check shapes, formats and (outside jit) values, and fill in what is not given; see `TextModel.__call__`.

    Raises:
      ValueError: naming the argument, what it is and what it should be.
    """
    input_ids = input_ids if isinstance(input_ids, jax.Array) else np.asarray(input_ids)
    if input_ids.ndim != 2 or input_ids.size == 0:
        raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}; expected [batch, tokens], both at least 1")
    if not jnp.issubdtype(input_ids.dtype, jnp.integer):
        raise ValueError(f"input_ids has dtype {input_ids.dtype}; expected integers")
    if _concrete(input_ids):
        low, high = int(input_ids.min()), int(input_ids.max())
        if low < 0 or high >= config.vocab_size:
            raise ValueError(f"input_ids span {low}..{high}; expected token ids in 0..{config.vocab_size - 1}")
    shape = tuple(input_ids.shape)
    given = {"attention_mask": attention_mask, "segment_ids": segment_ids, "position_ids": position_ids}
    arrays = {
        name: _checked(name, v if v is None or isinstance(v, jax.Array) else np.asarray(v), shape) for name, v in given.items()
    }
    segments = jnp.ones(shape, jnp.int32) if arrays["segment_ids"] is None else arrays["segment_ids"]
    if arrays["attention_mask"] is not None:
        segments = jnp.where(arrays["attention_mask"] != 0, segments, 0)
    if cache is not None:
        if cache.segment_ids.shape[0] != shape[0]:
            raise ValueError(f"the cache holds {cache.segment_ids.shape[0]} rows, input_ids has {shape[0]}")
        if _concrete(cache.index) and int(cache.index) + shape[1] > cache.length:
            raise ValueError(
                f"the cache has {cache.length} slots, {int(cache.index)} are used and {shape[1]} more do not fit; "
                "make a longer cache"
            )
    positions = arrays["position_ids"]
    if positions is None:
        start = 0 if cache is None else (cache.index + cache.offset)[:, None]
        positions = jnp.broadcast_to(start + jnp.arange(shape[1], dtype=jnp.int32), shape)
    return TextInputs(jnp.asarray(input_ids, jnp.int32), segments, positions)
