"""Which token goes to which peer, at which place. n tokens, G peers, K chosen, C bucket rows, M = min(K, E_local) slots a row.

A token is sent once to each peer that holds any of its experts, with the list of those experts and their weights; the peer
adds the weighted results before sending one row back. That is fewer rows than one for each choice, and it bounds a bucket by
the number of tokens however skewed the routing is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ernie_jax.moe.dispatch.protocol import ExchangePlan
from ernie_jax.moe.dispatch.replicated import own_experts
from ernie_jax.moe.permute import no_gradient
from ernie_jax.moe.routing import Routing


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PeerRows:
    """Where each token stands in each peer's bucket.

    Attributes:
      needed: [n, G] bool, the token goes to the peer.
      place: [n, G] int32, its row in the peer's bucket (meaningless where not needed).
      counts: [G] int32, rows for each peer.
    """

    needed: jax.Array
    place: jax.Array
    counts: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotRoute:
    """The ways of one exchange, there and back.

    Attributes:
      token: [S] int32, the token of each place of the send buffer, n (one past the last) for an empty one.
      peer: [S] int32, whose bucket the place is in.
      slot: [n, G] int32, the place of each (token, peer).
      needed: [n, G] bool, whether it has one.
    """

    token: jax.Array
    peer: jax.Array
    slot: jax.Array
    needed: jax.Array


def rows_for_peers(expert_index: jax.Array, plan: ExchangePlan) -> PeerRows:
    """Places in token order from the chosen experts [n, K] (entries equal to E go nowhere)."""
    peer = expert_index // plan.experts_per_shard
    needed = jnp.any(peer[..., None] == jnp.arange(plan.shards, dtype=peer.dtype), axis=1)
    running = jnp.cumsum(needed.astype(jnp.int32), axis=0)
    return PeerRows(needed, running - 1, running[-1])


def tokens_of_slots(rows: PeerRows, slot: jax.Array, num_slots: int) -> jax.Array:
    """For each of `num_slots` places of a send buffer, the token that fills it; n (one past the last) where it stays empty.

    Args:
      rows: who goes where.
      slot: [n, G] int32, the place of each (token, peer) in the buffer.
      num_slots: length of the buffer.
    """
    n = slot.shape[0]
    target = jnp.where(rows.needed, slot, num_slots)
    token = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32)[:, None], slot.shape)
    return jnp.full((num_slots,), n, jnp.int32).at[target.reshape(-1)].set(token.reshape(-1), mode="drop")


def slots_for_peers(routing: Routing, plan: ExchangePlan) -> tuple[jax.Array, jax.Array]:
    """For each peer, its experts among a token's choices: (local index [n, G, M], E_local for none; weights [n, G, M])."""
    parts = [own_experts(routing, jnp.int32(p * plan.experts_per_shard), plan.experts_per_shard) for p in range(plan.shards)]
    return jnp.stack([p.expert_index for p in parts], 1), jnp.stack([p.weights for p in parts], 1)


def words_of_slots(words: jax.Array, lists: jax.Array | None, route: SlotRoute) -> jax.Array:
    """Send buffer [S, W + L] from words of tokens [n, W] and of their lists [n, G, L]; zero where a place stays empty.

    Integers, without a gradient: see `packed_rows`.
    """
    n = words.shape[0]
    rows = jnp.take(words, route.token, axis=0, mode="clip")
    if lists is not None:
        place = jnp.minimum(route.token, n - 1) * lists.shape[1] + route.peer
        rows = jnp.concatenate([rows, jnp.take(lists.reshape(-1, lists.shape[-1]), place, axis=0, mode="clip")], -1)
    return jnp.where(_like(route.token < n, rows), rows, jnp.zeros((), rows.dtype))


def words_of_tokens(buffer: jax.Array, route: SlotRoute) -> jax.Array:
    """The transpose's rows, still to be added: buffer [S, W] -> [n, G, W], zero words where a token has no place."""
    rows = jnp.take(buffer, route.slot, axis=0, mode="clip")
    return jnp.where(_like(route.needed, rows), rows, jnp.zeros((), rows.dtype))


@jax.custom_vjp
def fill_slots(x: jax.Array, token: jax.Array, slot: jax.Array, needed: jax.Array) -> jax.Array:
    """Send buffer [S, ...] from x [n, ...]: slot s holds x[token[s]], zero where token[s] = n.

    The backward gathers the cotangent rows of each token's slots ([n, G]) and adds them: no scatter.
    """
    rows = jnp.take(x, token, axis=0, mode="clip")
    return jnp.where(_like(token < x.shape[0], rows), rows, 0)


@jax.custom_vjp
def collect_slots(buffer: jax.Array, token: jax.Array, slot: jax.Array, needed: jax.Array) -> jax.Array:
    """Sum of each token's rows: buffer [S, D] -> [n, D] with row i = sum over peers g of buffer[slot[i, g]] where needed."""
    return _gather_sum(buffer, slot, needed)


def _like(mask: jax.Array, rows: jax.Array) -> jax.Array:
    return mask.reshape(mask.shape + (1,) * (rows.ndim - mask.ndim))


def _gather_sum(buffer: jax.Array, slot: jax.Array, needed: jax.Array) -> jax.Array:
    rows = jnp.take(buffer, slot, axis=0, mode="clip")
    # `where`, not a product: a slot nobody filled may hold NaN.
    return jnp.sum(jnp.where(_like(needed, rows), rows, 0), axis=1)


_Indices = tuple[jax.Array, jax.Array, jax.Array]


def _fill_fwd(x: jax.Array, token: jax.Array, slot: jax.Array, needed: jax.Array) -> tuple[jax.Array, _Indices]:
    return fill_slots(x, token, slot, needed), (token, slot, needed)


def _fill_bwd(residuals: _Indices, ct: jax.Array) -> tuple[Any, ...]:
    _, slot, needed = residuals
    return (_gather_sum(ct, slot, needed), *map(no_gradient, residuals))


def _collect_fwd(buffer: jax.Array, token: jax.Array, slot: jax.Array, needed: jax.Array) -> tuple[jax.Array, _Indices]:
    return collect_slots(buffer, token, slot, needed), (token, slot, needed)


def _collect_bwd(residuals: _Indices, ct: jax.Array) -> tuple[Any, ...]:
    token, _, _ = residuals
    rows = jnp.take(ct, token, axis=0, mode="clip")
    filled = jnp.where(_like(token < ct.shape[0], rows), rows, 0)
    return (filled, *map(no_gradient, residuals))


fill_slots.defvjp(_fill_fwd, _fill_bwd)
collect_slots.defvjp(_collect_fwd, _collect_bwd)
