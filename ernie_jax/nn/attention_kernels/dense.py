"""Attention with the whole score matrix. B batch, T queries, S keys, hk kv heads, g query heads a kv head, d head width."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ernie_jax.nn.attention_kernels.mask import AttentionMask

# Finite, so that a row that sees nothing stays free of NaN in both directions.
MASKED = -1e30


def dense_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask, chunk: int, tag: str = "attn") -> jax.Array:
    """See `attend`; `chunk` is not used."""
    batch, queries, heads, width = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(batch, queries, kv_heads, heads // kv_heads, width)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, k, preferred_element_type=jnp.float32) * width**-0.5
    seen = mask.allowed()
    probabilities = jax.nn.softmax(jnp.where(seen[:, None, None], scores, MASKED), axis=-1)
    # A query that sees nothing would average over everything.
    probabilities = jnp.where(seen.any(-1)[:, None, None, :, None], probabilities, 0.0)
    out = jnp.einsum("bkgts,bskd->btkgd", probabilities.astype(q.dtype), v)
    return checkpoint_name(out.reshape(batch, queries, heads, width).astype(q.dtype), f"{tag}_out")
