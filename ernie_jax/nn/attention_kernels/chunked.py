"""Attention tile by tile, with memory linear in the sequence, forward and backward.

B batch, T queries, S keys, hk kv heads, g query heads a kv head, d head width; c tile height, N / M number of query / key tiles.

The forward keeps a running maximum and sum for each query (Milakov and Gimelshein 2018; Dao et al. 2022) and saves the output
and the log of the sum; the backward computes each tile's scores again. Tiles without an allowed pair (above the diagonal, or
between different documents) are skipped at run time.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ernie_jax.nn.attention_kernels.dense import MASKED
from ernie_jax.nn.attention_kernels.mask import AttentionMask, allowed


class _Tiles(NamedTuple):
    """Arrays cut in tiles along a leading axis: q [N, B, hk, g, c, d], k and v [M, B, hk, c, d], their segments and indices."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    query_segments: jax.Array
    query_index: jax.Array
    key_segments: jax.Array
    key_index: jax.Array

    def seen(self, i: jax.Array, j: jax.Array) -> jax.Array:
        """[B, 1, 1, c, c] bool of query tile i against key tile j."""
        tile = allowed(self.query_segments[i], self.query_index[i], self.key_segments[j], self.key_index[j])
        return tile[:, None, None]

    def scores(self, i: jax.Array, j: jax.Array) -> jax.Array:
        """[B, hk, g, c, c] float32 of query tile i against key tile j, masked."""
        product = jnp.einsum("bkgtd,bksd->bkgts", self.q[i], self.k[j], preferred_element_type=jnp.float32)
        return jnp.where(self.seen(i, j), product * self.q.shape[-1] ** -0.5, MASKED)


def chunked_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask, chunk: int) -> jax.Array:
    """See `attend`; tiles are at most `chunk` tokens high and need not divide the sequence."""
    return _attention(q, k, v, mask, min(chunk, max(q.shape[1], k.shape[1])))


def tile_table(mask: AttentionMask, chunk: int) -> jax.Array:
    """[N, M] bool: which tiles may hold an allowed pair in any row; the others are never computed."""
    query = _cut_tokens(mask.query_segment_ids, chunk), _cut_tokens(mask.query_index, chunk)
    key = _cut_tokens(mask.key_segment_ids, chunk), _cut_tokens(mask.key_index, chunk)
    return _table(*query, *key)


def _table(query_segments: jax.Array, query_index: jax.Array, key_segments: jax.Array, key_index: jax.Array) -> jax.Array:
    big = np.iinfo(np.int32).max

    def bounds(values: jax.Array, segments: jax.Array) -> tuple[jax.Array, jax.Array]:
        real = segments != 0
        return jnp.where(real, values, big).min(-1), jnp.where(real, values, -1).max(-1)

    q_low, q_high = bounds(query_segments, query_segments)
    k_low, k_high = bounds(key_segments, key_segments)
    _, q_last = bounds(query_index, query_segments)
    k_first, _ = bounds(key_index, key_segments)
    overlap = (q_low[:, None] <= k_high[None]) & (k_low[None] <= q_high[:, None])
    return jnp.any(overlap & (k_first[None] <= q_last[:, None]), axis=-1)


def _cut_tokens(x: jax.Array, chunk: int) -> jax.Array:
    """[B, T] -> [tiles, B, chunk]; the added tokens are 0, which for segments means padding."""
    count = math.ceil(x.shape[1] / chunk)
    padded = jnp.pad(x, ((0, 0), (0, count * chunk - x.shape[1])))
    return jnp.moveaxis(padded.reshape(x.shape[0], count, chunk), 1, 0)


def _cut_heads(x: jax.Array, chunk: int) -> jax.Array:
    """[B, T, ..., d] -> [tiles, B, ..., chunk, d]: heads before tokens, as the tile products want them."""
    count = math.ceil(x.shape[1] / chunk)
    pad = [(0, 0)] * x.ndim
    pad[1] = (0, count * chunk - x.shape[1])
    tiles = jnp.pad(x, pad).reshape(x.shape[0], count, chunk, *x.shape[2:])
    return jnp.moveaxis(jnp.moveaxis(tiles, 1, 0), 2, -2)


def _join_heads(tiles: jax.Array, tokens: int) -> jax.Array:
    """The inverse of `_cut_heads`."""
    x = jnp.moveaxis(jnp.moveaxis(tiles, -2, 2), 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :tokens]


def _cut(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask, chunk: int) -> tuple[_Tiles, jax.Array]:
    batch, queries, heads, width = q.shape
    grouped = q.reshape(batch, queries, k.shape[2], heads // k.shape[2], width)
    tiles = _Tiles(
        _cut_heads(grouped, chunk),
        _cut_heads(k, chunk),
        _cut_heads(v, chunk),
        _cut_tokens(mask.query_segment_ids, chunk),
        _cut_tokens(mask.query_index, chunk),
        _cut_tokens(mask.key_segment_ids, chunk),
        _cut_tokens(mask.key_index, chunk),
    )
    return tiles, _table(*tiles[3:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask, chunk: int) -> jax.Array:
    return _forward(q, k, v, mask, chunk)[0]


def _forward(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask, chunk: int) -> tuple[jax.Array, jax.Array]:
    """Output [B, T, hq, d] and log-sum-exp [N, B, hk, g, c] of the scores of each query."""
    tiles, table = _cut(q, k, v, mask, chunk)
    count = tiles.k.shape[0]

    def query_tile(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        shape = tiles.q.shape[1:-1]

        def add(j: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            top, total, out = carry
            scores = tiles.scores(i, j)
            new_top = jnp.maximum(top, scores.max(-1))
            # Masked entries by hand: in a tile row without any, exp(score - top) would be exp(0).
            weights = jnp.where(tiles.seen(i, j), jnp.exp(scores - new_top[..., None]), 0.0)
            fade = jnp.exp(top - new_top)
            product = jnp.einsum(
                "bkgts,bksd->bkgtd", weights.astype(v.dtype), tiles.v[j], preferred_element_type=jnp.float32
            )
            return new_top, total * fade + weights.sum(-1), out * fade[..., None] + product

        start = (jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros((*shape, tiles.q.shape[-1])))
        top, total, out = jax.lax.fori_loop(
            0, count, lambda j, carry: jax.lax.cond(table[i, j], add, lambda j, c: c, j, carry), start
        )
        seen = total > 0
        safe = jnp.where(seen, total, 1.0)
        return (jnp.where(seen[..., None], out / safe[..., None], 0.0)).astype(q.dtype), top + jnp.log(safe)

    out, log_sum = jax.lax.map(query_tile, jnp.arange(tiles.q.shape[0]))
    return _join_heads(out, q.shape[1]).reshape(q.shape), log_sum


def _attention_fwd(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask, chunk: int):  # type: ignore[no-untyped-def]
    out, log_sum = _forward(q, k, v, mask, chunk)
    return out, (q, k, v, mask, out, log_sum)


def _attention_bwd(chunk: int, saved, ct: jax.Array):  # type: ignore[no-untyped-def]
    q, k, v, mask, out, log_sum = saved
    tiles, table = _cut(q, k, v, mask, chunk)
    batch, queries, heads, width = q.shape
    grouped = (batch, queries, k.shape[2], heads // k.shape[2], width)
    ct_tiles = _cut_heads(ct.reshape(grouped), chunk)
    # sum_d(ct * out): what the softmax backward subtracts from each query's scores.
    inner = _cut_heads((ct.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1).reshape(*grouped[:-1], 1), chunk)
    scale = width**-0.5

    def key_tile(d_q: jax.Array, j: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        def add(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            d_q, d_k, d_v = carry
            weights = jnp.where(tiles.seen(i, j), jnp.exp(tiles.scores(i, j) - log_sum[i][..., None]), 0.0)
            f32 = jnp.float32
            d_v += jnp.einsum("bkgts,bkgtd->bksd", weights.astype(v.dtype), ct_tiles[i], preferred_element_type=f32)
            d_weights = jnp.einsum("bkgtd,bksd->bkgts", ct_tiles[i], tiles.v[j], preferred_element_type=f32)
            d_scores = (weights * (d_weights - inner[i]) * scale).astype(q.dtype)
            d_k += jnp.einsum("bkgts,bkgtd->bksd", d_scores, tiles.q[i], preferred_element_type=f32)
            tile = jnp.einsum("bkgts,bksd->bkgtd", d_scores, tiles.k[j], preferred_element_type=f32)
            return d_q.at[i].add(tile), d_k, d_v

        zero = jnp.zeros(tiles.k.shape[1:], jnp.float32)
        d_q, d_k, d_v = jax.lax.fori_loop(
            0,
            tiles.q.shape[0],
            lambda i, carry: jax.lax.cond(table[i, j], add, lambda i, c: c, i, carry),
            (d_q, zero, zero),
        )
        return d_q, (d_k, d_v)

    d_q, (d_k, d_v) = jax.lax.scan(key_tile, jnp.zeros(tiles.q.shape, jnp.float32), jnp.arange(tiles.k.shape[0]))
    no_gradient = jax.tree.map(lambda a: np.zeros(a.shape, jax.dtypes.float0), mask)
    return (
        _join_heads(d_q, queries).reshape(q.shape).astype(q.dtype),
        _join_heads(d_k, k.shape[1]).astype(k.dtype),
        _join_heads(d_v, v.shape[1]).astype(v.dtype),
        no_gradient,
    )


_attention.defvjp(_attention_fwd, _attention_bwd)
