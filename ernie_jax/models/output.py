"""What a model returns. B batch, T tokens, D model, V vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from ernie_jax.moe.routing import RouterOutput
from ernie_jax.nn.kv_cache import KVCache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModelOutput:
    """Result of a forward pass.

    Attributes:
      logits: [B, T, V] float32.
      router: for each MoE layer in order, its raw `logits` [B, T, E] and `load` [E]; empty for a dense model.
      hidden_states: on request, embeddings and each layer's output [B, T, D], the last one after the final norm.
      cache: the key/value cache including these tokens, when one was given.
    """

    logits: jax.Array
    router: tuple[RouterOutput, ...] = ()
    hidden_states: tuple[jax.Array, ...] | None = None
    cache: KVCache | None = None
