"""Attention kernels by name, all with one signature and one mask."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ernie_jax.nn.attention_kernels.chunked import chunked_attention, tile_table
from ernie_jax.nn.attention_kernels.cudnn import cudnn_attention
from ernie_jax.nn.attention_kernels.dense import dense_attention
from ernie_jax.nn.attention_kernels.mask import AttentionMask

ATTENTION_KERNELS: dict[str, Callable[[jax.Array, jax.Array, jax.Array, AttentionMask, int], jax.Array]] = {
    "dense": dense_attention,
    "chunked": chunked_attention,
    "cudnn": cudnn_attention,
}


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask, *, implementation: str = "dense", chunk: int = 1024
) -> jax.Array:
    """Grouped-query attention: softmax(q k^T / sqrt(d)) v over the pairs the mask allows.

    Query head h uses kv head h // (hq / hk); keys and values are never repeated. Scores and softmax are float32.

    Args:
      q: [B, T, hq, d].
      k, v: [B, S, hk, d].
      mask: over the T queries and S keys.
      implementation: a key of ATTENTION_KERNELS.
      chunk: tile height of the chunked kernel.

    Returns:
      [B, T, hq, d] in q's format; exactly zero for a query that sees nothing.

    Raises:
      ValueError: an unknown implementation, or heads that do not group.
    """
    if implementation not in ATTENTION_KERNELS:
        raise ValueError(f"unknown attention {implementation!r}; expected one of {sorted(ATTENTION_KERNELS)}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads cannot share {k.shape[2]} kv heads evenly")
    return ATTENTION_KERNELS[implementation](q, k, v, mask, chunk)


def choose_implementation(name: str, *, query_length: int, backend: str, chunk_from: int, dtype: DTypeLike) -> str:
    """The kernel that `auto` stands for: cuDNN on GPU in 16 bits, else chunked beyond `chunk_from` queries, else dense."""
    if name != "auto":
        return name
    if backend == "gpu" and jnp.dtype(dtype).itemsize == 2:
        return "cudnn"
    return "chunked" if query_length > chunk_from else "dense"


__all__ = ["ATTENTION_KERNELS", "AttentionMask", "attend", "choose_implementation", "tile_table"]
