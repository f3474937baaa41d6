"""Attention by kernels of our own for CPUs (see `ernie_jax.native`), in float32.

B batch, T queries, S keys, hq/hk query/kv heads, d head width.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ernie_jax.native import ffi_call, load, missing
from ernie_jax.nn.attention_kernels.mask import AttentionMask
from ernie_jax.sharding import Layout, current_layout, on_shards

Array = jax.Array
# The layout, taken on the way forward since the backward pass is traced after it has been left, and the tag.
_Static = tuple[Layout | None, str]
_Q = ("batch", "full_sequence", "activation_heads", None)
_KV = ("batch", "full_sequence", "activation_kv_heads", None)
_LOG_SUM = ("batch", "activation_heads", "full_sequence")
_PLACES = (("batch", "full_sequence"),) * 4


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
    layout = current_layout()
    if not _divides(layout, q.shape, k.shape):
        raise ValueError(
            f"attention='native' needs batch and heads that the mesh divides, got q {q.shape} and k {k.shape}; "
            "use 'auto', 'dense' or 'chunked'"
        )
    places = tuple(x.astype(jnp.int32) for x in (mask.query_segment_ids, mask.query_index, mask.key_segment_ids, mask.key_index))
    return _attention((layout, tag), q, k, v, places)


def fits_natively(q: Array, k: Array, *, on_meshes: bool = True) -> bool:
    """Whether `auto` may take these kernels on CPU.

    Args:
      q: [B, T, hq, d].
      k: [B, S, hk, d].
      on_meshes: whether they are laid out as the decoder's, and so can be cut into those of devices.

    Returns:
      True where the kernels are to be had, and the mesh, if there is one of several devices, divides batch and heads.
    """
    layout = current_layout()
    alone = layout is None or layout.mesh.size == 1
    return missing() is None and (alone or (on_meshes and _divides(layout, q.shape, k.shape)))


def _divides(layout: Layout | None, q: tuple[int, ...], k: tuple[int, ...]) -> bool:
    if layout is None or layout.mesh.size == 1:
        return True
    heads = layout.shards("activation_heads")
    return q[0] % layout.shards("batch") == 0 and heads == layout.shards("activation_kv_heads") and k[2] % heads == 0


def _attention_forward(static: _Static, q: Array, k: Array, v: Array, places: tuple[Array, ...]) -> tuple[Array, tuple[Any, ...]]:
    layout, tag = static

    def kernel(q: Array, *others: Array) -> Any:
        batch, queries, heads, _ = q.shape
        results = jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32)
        return tuple(ffi_call("ernie_attention_forward", results)(q, *others))

    out, log_sum = on_shards(kernel, layout, (_Q, _KV, _KV, *_PLACES), (_Q, _LOG_SUM))(q, k, v, *places)
    # Named here, where the backward's own copies are: kept under these names, they spare it this pass.
    out, log_sum = checkpoint_name(out, f"{tag}_out"), checkpoint_name(log_sum, f"{tag}_log_sum")
    return out, (q, k, v, places, out, log_sum)


def _attention_backward(static: _Static, saved: tuple[Any, ...], ct: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, places, out, log_sum = saved

    def kernel(*arrays: Array) -> Any:
        results = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[:3])
        return tuple(ffi_call("ernie_attention_backward", results)(*arrays))

    axes = (_Q, _KV, _KV, *_PLACES, _Q, _LOG_SUM, _Q)
    d_q, d_k, d_v = on_shards(kernel, static[0], axes, (_Q, _KV, _KV))(q, k, v, *places, out, log_sum, ct)
    return d_q, d_k, d_v, None


def _value(static: _Static, q: Array, k: Array, v: Array, places: tuple[Array, ...]) -> Array:
    return _attention_forward(static, q, k, v, places)[0]


_attention = jax.custom_vjp(_value, nondiff_argnums=(0,))
_attention.defvjp(_attention_forward, _attention_backward)
