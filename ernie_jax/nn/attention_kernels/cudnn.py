"""Attention by cuDNN, on NVIDIA GPUs in 16 bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ernie_jax.nn.attention_kernels.mask import AttentionMask


def cudnn_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask, chunk: int) -> jax.Array:
    """See `attend`; `chunk` is not used.

    Raises:
      ValueError: on another backend than GPU, or in float32, which the kernel does not have.
    """
    if jax.default_backend() != "gpu":
        raise ValueError(f"attention='cudnn' needs an NVIDIA GPU, this is {jax.default_backend()!r}; use 'auto', 'dense' or 'chunked'")
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(f"attention='cudnn' works in bfloat16 or float16, got {q.dtype}; set dtype='bfloat16' or attention='chunked'")
    seen = mask.allowed()
    # A row that sees nothing must not reach the kernel's softmax; it looks at key 0 and is zeroed after.
    some = seen.any(-1)
    safe = seen | (~some[..., None] & (jnp.arange(k.shape[1]) == 0))
    out = jax.nn.dot_product_attention(q, k, v, mask=safe[:, None], implementation="cudnn")
    return jnp.where(some[..., None, None], out, 0)
