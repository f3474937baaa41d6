"""Attention by kernels of our own for CPUs (see `ernie_jax.native`), in float32.

B batch, T queries, S keys, hq/hk query/kv heads, d head width.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ernie_jax.native import load
from ernie_jax.nn.attention_kernels.mask import AttentionMask

Array = jax.Array


def native_attention(q: Array, k: Array, v: Array, mask: AttentionMask, chunk: int, tag: str = "attn") -> Array:
    """See `attend`; `chunk` is not used: tiles are as the processor's registers and caches want them.

    Raises:
      ValueError: another format than float32, another platform than CPU, or no compiler for the kernels.
    """
    if jax.default_backend() != "cpu":
        raise ValueError(f"attention='native' is for CPUs, this is {jax.default_backend()!r}; use 'auto', 'dense' or 'chunked'")
    if any(x.dtype != jnp.float32 for x in (q, k, v)):
        raise ValueError(
            f"attention='native' computes in float32, got q {q.dtype}, k {k.dtype}, v {v.dtype}; use 'auto', 'dense' or 'chunked'"
        )
    load()
    places = tuple(
        x.astype(jnp.int32) for x in (mask.query_segment_ids, mask.query_index, mask.key_segment_ids, mask.key_index)
    )
    return _attention(tag, q, k, v, places)


def _attention_forward(tag: str, q: Array, k: Array, v: Array, places: tuple[Array, ...]) -> tuple[Array, tuple[Any, ...]]:
    batch, queries, heads, _ = q.shape
    results = jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32)
    out, log_sum = jax.ffi.ffi_call("ernie_attention_forward", results)(q, k, v, *places)
    # Named here, where the backward's own copies are: kept under these names, they spare it this pass.
    out, log_sum = checkpoint_name(out, f"{tag}_out"), checkpoint_name(log_sum, f"{tag}_log_sum")
    return out, (q, k, v, places, out, log_sum)


def _attention_backward(tag: str, saved: tuple[Any, ...], ct: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, places, out, log_sum = saved
    results = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v))
    return (*jax.ffi.ffi_call("ernie_attention_backward", results)(q, k, v, *places, out, log_sum, ct), None)


def _value(tag: str, q: Array, k: Array, v: Array, places: tuple[Array, ...]) -> Array:
    return _attention_forward(tag, q, k, v, places)[0]


_attention = jax.custom_vjp(_value, nondiff_argnums=(0,))
_attention.defvjp(_attention_forward, _attention_backward)
