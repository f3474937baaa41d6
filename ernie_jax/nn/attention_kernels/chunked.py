"""Attention tile by tile, with memory linear in the sequence, forward and backward.

B batch, T queries, S keys, hk kv heads, g query heads a kv head, d head width; N query tiles of t tokens, M key tiles of s.

The forward keeps a running maximum and sum for each query (Milakov and Gimelshein 2018; Dao et al. 2022) and saves the output
and the log of the sum; the backward computes each tile's scores again. Tiles without an allowed pair (above the diagonal, or
between different documents) are not visited: each loop runs over a list made from the mask before it, as long as the work.
The lists are one for the whole batch, so that a batch sharded over devices agrees on them before any loop starts.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ernie_jax.nn.attention_kernels.dense import MASKED
from ernie_jax.nn.attention_kernels.mask import AttentionMask
from ernie_jax.nn.attention_kernels.tiles import Tiles, Visits, cut_heads, group_heads, join_heads, tile_table


class _Saved(NamedTuple):
    """What the backward needs: the inputs, the output [B, T, hq, d], log-sum-exp [N, B, hk, g, t], and the tile table [N, M]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    mask: AttentionMask
    out: jax.Array
    log_sum: jax.Array
    table: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def chunked_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask, chunk: int, tag: str = "attn") -> jax.Array:
    """See `attend`; tiles are at most `chunk` tokens long and need not divide the sequences."""
    return _forward(q, k, v, mask, chunk, tag)[0]


def _forward(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask, chunk: int, tag: str) -> tuple[jax.Array, _Saved]:
    tiles = Tiles.cut(q, k, v, mask, chunk)
    table = tile_table(mask, chunk)
    visits = Visits.of(table)

    def query_tile(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        shape = tiles.q.shape[1:-1]

        def add(n: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            top, total, out = carry
            j = visits.order[i, n]
            scores = tiles.scores(i, j)
            new_top = jnp.maximum(top, scores.max(-1))
            weights = jnp.exp(scores - new_top[..., None])
            fade = jnp.exp(top - new_top)
            product = jnp.einsum("bkgts,bksd->bkgtd", weights.astype(q.dtype), tiles.v[j], preferred_element_type=jnp.float32)
            return new_top, total * fade + weights.sum(-1), out * fade[..., None] + product

        start = (
            # Far above a masked score: for a query without any key so far, exp(score - top) is 0 and not exp(0).
            jnp.full(shape, MASKED / 2, jnp.float32),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros(tiles.q.shape[1:], jnp.float32),
        )
        top, total, out = jax.lax.fori_loop(0, visits.length[i], add, start)
        # A query that sees nothing: its output is 0, and so are the weights that the backward computes, exp(MASKED - 0).
        some = total > 0
        total = jnp.where(some, total, 1.0)
        return (out / total[..., None]).astype(q.dtype), jnp.where(some, top + jnp.log(total), 0.0)

    out_tiles, log_sum = jax.lax.map(query_tile, jnp.arange(tiles.q.shape[0]))
    # Named here, where the backward's own copies are: kept under these names, they spare it this pass.
    out = checkpoint_name(join_heads(out_tiles, q.shape[1]).reshape(q.shape), f"{tag}_out")
    log_sum = checkpoint_name(log_sum, f"{tag}_log_sum")
    return out, _Saved(q, k, v, mask, out, log_sum, table)


def _backward(chunk: int, tag: str, saved: _Saved, ct: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, mask, out, log_sum, table = saved
    tiles = Tiles.cut(q, k, v, mask, chunk)
    visits = Visits.of(table.T)
    kv_heads, query_length = k.shape[2], tiles.q.shape[-2]
    ct_tiles = cut_heads(group_heads(ct, kv_heads), query_length)
    # sum_d(ct * out): what the softmax's backward subtracts from each query's scores.
    inner = (ct.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1, keepdims=True)
    inner_tiles = cut_heads(group_heads(inner, kv_heads), query_length)
    # Turned once here, not in every visit: a product over queries takes them as its left side, whole rows of tokens, and the
    # [t, s] side as it lies.
    q_turned, ct_turned = (jnp.swapaxes(_merge(x), -1, -2) for x in (tiles.q, ct_tiles))
    scale = q.shape[-1] ** -0.5
    k_shape = tiles.k.shape[1:]
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    def key_tile(d_q: jax.Array, j: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        def add(n: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            d_q, d_k, d_v = carry
            i = visits.order[j, n]
            weights = jnp.exp(tiles.scores(i, j) - log_sum[i][..., None])
            d_v += product("bkdr,bkrs->bkds", ct_turned[i], _merge(weights.astype(q.dtype)))
            d_weights = product("bkgtd,bksd->bkgts", ct_tiles[i], tiles.v[j])
            d_scores = (weights * (d_weights - inner_tiles[i]) * scale).astype(q.dtype)
            d_k += product("bkdr,bkrs->bkds", q_turned[i], _merge(d_scores))
            return d_q.at[i].add(product("bkgts,bksd->bkgtd", d_scores, tiles.k[j])), d_k, d_v

        zero = jnp.zeros((*k_shape[:-2], k_shape[-1], k_shape[-2]), jnp.float32)
        d_q, d_k, d_v = jax.lax.fori_loop(0, visits.length[j], add, (d_q, zero, zero))
        return d_q, (jnp.swapaxes(d_k, -1, -2).astype(k.dtype), jnp.swapaxes(d_v, -1, -2).astype(v.dtype))

    d_q, (d_k, d_v) = jax.lax.scan(key_tile, jnp.zeros(tiles.q.shape, jnp.float32), jnp.arange(tiles.k.shape[0]))
    return (
        join_heads(d_q, q.shape[1]).reshape(q.shape).astype(q.dtype),
        join_heads(d_k, k.shape[1]),
        join_heads(d_v, v.shape[1]),
        None,
    )


def _merge(x: jax.Array) -> jax.Array:
    """[..., g, t, w] -> [..., g t, w]."""
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])


chunked_attention.defvjp(_forward, _backward)
