"""Attention by cuDNN, on NVIDIA GPUs in 16 bits. B batch, T queries, S keys, hq/hk query/kv heads, d head width."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ernie_jax.nn.attention_kernels.mask import AttentionMask


def cudnn_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask, chunk: int, tag: str = "attn") -> jax.Array:
    """See `attend`; `chunk` is not used.

    Raises:
      ValueError: on another backend than GPU, or in float32, which the kernel does not have.
    """
    if jax.default_backend() != "gpu":
        raise ValueError(
            f"attention='cudnn' needs an NVIDIA GPU, this is {jax.default_backend()!r}; use 'auto', 'dense' or 'chunked'"
        )
    if any(x.dtype not in (jnp.bfloat16, jnp.float16) for x in (q, k, v)):
        raise ValueError(
            f"attention='cudnn' works in bfloat16 or float16, got q {q.dtype}, k {k.dtype}, v {v.dtype}; "
            "compute in bfloat16, or use 'chunked' or 'dense' in float32"
        )
    # The kernel's own statistics have no tag: under a policy that recomputes anything in the layer, it runs forward twice.
    return checkpoint_name(library_attention(q, k, v, mask, "cudnn"), f"{tag}_out")


def library_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask, implementation: Literal["cudnn", "xla"]
) -> jax.Array:
    """`jax.nn.dot_product_attention` under our mask, as an array of bool [B, 1, T, S], the one form that holds every mask here."""
    seen = mask.allowed()
    # A row that sees nothing must not reach the kernel's softmax: it looks at key 0, and is zeroed after.
    some = seen.any(-1)
    safe = seen | (~some[..., None] & (jnp.arange(k.shape[1]) == 0))
    out = jax.nn.dot_product_attention(q, k, v, mask=safe[:, None], scale=q.shape[-1] ** -0.5, implementation=implementation)
    return jnp.where(some[..., None, None], out, 0)
