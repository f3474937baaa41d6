"""Sequences cut in tiles, and which pairs of tiles have work.

B batch, T queries, S keys, hk kv heads, g query heads a kv head, d head width; N query tiles of t tokens, M key tiles of s.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ernie_jax.nn.attention_kernels.dense import MASKED
from ernie_jax.nn.attention_kernels.mask import AttentionMask, allowed


class Tiles(NamedTuple):
    """q [N, B, hk, g, t, d], k and v [M, B, hk, s, d], their segments and indices [N or M, B, t or s]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    query_segments: jax.Array
    query_index: jax.Array
    key_segments: jax.Array
    key_index: jax.Array

    @classmethod
    def cut(cls, q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask, chunk: int) -> Tiles:
        """Tiles of at most `chunk` tokens from q [B, T, hq, d], k and v [B, S, hk, d]."""
        query_tile, key_tile = tile_lengths(q.shape[1], k.shape[1], chunk)
        return cls(
            cut_heads(group_heads(q, k.shape[2]), query_tile),
            cut_heads(k, key_tile),
            cut_heads(v, key_tile),
            *cut_mask(mask, chunk),
        )

    def seen(self, i: jax.Array, j: jax.Array) -> jax.Array:
        """[B, 1, 1, t, s] bool of query tile i against key tile j."""
        pairs = allowed(self.query_segments[i], self.query_index[i], self.key_segments[j], self.key_index[j])
        return pairs[:, None, None]

    def scores(self, i: jax.Array, j: jax.Array) -> jax.Array:
        """[B, hk, g, t, s] float32 of query tile i against key tile j, scaled and masked."""
        product = jnp.einsum("bkgtd,bksd->bkgts", self.q[i], self.k[j], preferred_element_type=jnp.float32)
        return jnp.where(self.seen(i, j), product * self.q.shape[-1] ** -0.5, MASKED)


class Visits(NamedTuple):
    """For each tile of one side, the tiles of the other side to visit: `order[i, : length[i]]`, ascending."""

    order: jax.Array
    length: jax.Array

    @classmethod
    def of(cls, table: jax.Array) -> Visits:
        """From a table [tiles, others] bool."""
        # A stable sort of the skipped ones to the end keeps the rest in order.
        return cls(jnp.argsort(~table, axis=-1, stable=True).astype(jnp.int32), table.sum(-1, dtype=jnp.int32))


def tile_lengths(queries: int, keys: int, chunk: int) -> tuple[int, int]:
    """Tokens of a query tile and of a key tile: no tile is longer than its sequence."""
    return min(chunk, queries), min(chunk, keys)


def tile_table(mask: AttentionMask, chunk: int) -> jax.Array:
    """[N, M] bool: which tiles may hold an allowed pair in any row of the batch; the others are never computed.

    A pair of tiles is kept when the ranges of their segment ids meet and the first key is not after the last query. For
    documents packed one after another with growing ids this is exact but for the order within one document.
    """
    query_segments, query_index, key_segments, key_index = cut_mask(mask, chunk)
    query_low, query_high = _range(query_segments, query_segments)
    key_low, key_high = _range(key_segments, key_segments)
    query_last = _range(query_index, query_segments)[1]
    key_first = _range(key_index, key_segments)[0]
    meet = (query_low[:, None] <= key_high[None]) & (key_low[None] <= query_high[:, None])
    return jnp.any(meet & (key_first[None] <= query_last[:, None]), axis=-1)


def _range(values: jax.Array, segments: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Least and greatest value of the tokens that are no padding, [tiles, B]; an empty range (big, -1) without any."""
    real = segments != 0
    return jnp.where(real, values, np.iinfo(np.int32).max).min(-1), jnp.where(real, values, -1).max(-1)


def cut_mask(mask: AttentionMask, chunk: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Query segments, query index, key segments and key index as [tiles, B, tile]; added tokens have segment 0, padding."""
    query_tile, key_tile = tile_lengths(mask.query_index.shape[1], mask.key_index.shape[1], chunk)
    return (
        _cut(mask.query_segment_ids, query_tile),
        _cut(mask.query_index, query_tile),
        _cut(mask.key_segment_ids, key_tile),
        _cut(mask.key_index, key_tile),
    )


def group_heads(x: jax.Array, kv_heads: int) -> jax.Array:
    """[B, T, hq, ...] -> [B, T, hk, g, ...]."""
    return x.reshape(*x.shape[:2], kv_heads, x.shape[2] // kv_heads, *x.shape[3:])


def cut_heads(x: jax.Array, length: int) -> jax.Array:
    """[B, T, heads..., d] -> [tiles, B, heads..., length, d]: heads before tokens, so that tile products need no transposes."""
    return jnp.moveaxis(_cut(x, length), 2, -2)


def join_heads(tiles: jax.Array, tokens: int) -> jax.Array:
    """The inverse of `cut_heads` for a sequence of `tokens`."""
    x = jnp.moveaxis(jnp.moveaxis(tiles, -2, 2), 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :tokens]


def _cut(x: jax.Array, length: int) -> jax.Array:
    """[B, T, ...] -> [tiles, B, length, ...], filled up with zeros."""
    count = math.ceil(x.shape[1] / length)
    pad = [(0, 0)] * x.ndim
    pad[1] = (0, count * length - x.shape[1])
    return jnp.moveaxis(jnp.pad(x, pad).reshape(x.shape[0], count, length, *x.shape[2:]), 1, 0)
