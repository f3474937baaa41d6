"""Attention kernels by name, all with one signature and one mask."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ernie_jax.nn.attention_kernels.chunked import chunked_attention
from ernie_jax.nn.attention_kernels.cudnn import cudnn_attention
from ernie_jax.nn.attention_kernels.dense import dense_attention
from ernie_jax.nn.attention_kernels.mask import AttentionMask
from ernie_jax.nn.attention_kernels.native import fits_natively, native_attention
from ernie_jax.nn.attention_kernels.tiles import tile_table

ATTENTION_KERNELS: dict[str, Callable[[jax.Array, jax.Array, jax.Array, AttentionMask, int, str], jax.Array]] = {
    "native": native_attention,
    "dense": dense_attention,
    "chunked": chunked_attention,
    "cudnn": cudnn_attention,
}


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: AttentionMask,
    *,
    implementation: str = "dense",
    chunk: int = 1024,
    tag: str = "attn",
) -> jax.Array:
    """Grouped-query attention: softmax(q k^T / sqrt(d)) v over the pairs the mask allows.

    Query head h uses kv head h // (hq / hk); keys and values are never repeated. Scores and softmax are float32.

    Args:
      q: [B, T, hq, d].
      k, v: [B, S, hk, d].
      mask: over the T queries and S keys.
      implementation: a key of ATTENTION_KERNELS.
      chunk: most tokens of a tile of the chunked kernel.
      tag: what the tensors that a backward pass needs are called for rematerialisation: `<tag>_out`, and of the chunked kernel
        `<tag>_log_sum`.

    Returns:
      [B, T, hq, d] in q's dtype; exactly zero for a query that sees nothing.

    Raises:
      ValueError: an unknown implementation, shapes that do not fit each other, or what a kernel itself cannot do.
    """
    if implementation not in ATTENTION_KERNELS:
        raise ValueError(f"unknown attention {implementation!r}; expected one of {sorted(ATTENTION_KERNELS)}")
    _check_shapes(q, k, v, mask)
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, got {chunk}")
    return ATTENTION_KERNELS[implementation](q, k, v, mask, chunk, tag)


def choose_implementation(
    name: str, *, query_length: int, backend: str, chunk_from: int, dtype: DTypeLike, native: bool = False
) -> str:
    """The kernel that a configured name stands for.

    Args:
      name: a key of ATTENTION_KERNELS, or `auto`: cuDNN on GPU in 16 bits, on CPU in float32 the native kernel where it fits,
        else chunked beyond `chunk_from` queries, else dense.
      query_length: T.
      backend: `cpu`, `gpu` or `tpu`.
      chunk_from: longest T for the dense kernel, in tokens.
      dtype: of q.
      native: whether the native kernel fits (see `fits_natively`).

    Raises:
      ValueError: an unknown name.
    """
    if name in ATTENTION_KERNELS:
        return name
    if name != "auto":
        raise ValueError(f"unknown attention {name!r}; expected 'auto' or one of {sorted(ATTENTION_KERNELS)}")
    if backend == "gpu" and jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16):
        return "cudnn"
    if native and backend == "cpu" and jnp.dtype(dtype) == jnp.float32:
        return "native"
    return "chunked" if query_length > chunk_from else "dense"


def _check_shapes(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> None:
    if q.ndim != 4 or k.shape != v.shape or (k.shape[0], k.shape[-1]) != (q.shape[0], q.shape[-1]):
        raise ValueError(f"expected q [B, T, hq, d] and k, v [B, S, hk, d], got q {q.shape}, k {k.shape}, v {v.shape}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads cannot share {k.shape[2]} kv heads evenly; hq must be a multiple of hk")
    if mask.query_index.shape != q.shape[:2] or mask.key_index.shape != k.shape[:2]:
        raise ValueError(
            f"the mask is for queries {mask.query_index.shape} and keys {mask.key_index.shape}, "
            f"but q has {q.shape[:2]} and k {k.shape[:2]}; build it from the same [B, T] segment ids"
        )


__all__ = ["ATTENTION_KERNELS", "AttentionMask", "attend", "choose_implementation", "fits_natively", "tile_table"]
