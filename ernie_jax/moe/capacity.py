"""Capacity: how many tokens of one row an expert takes before it drops. B rows, T tokens, E experts, K chosen.

Capacity is counted for each row of the batch on its own. Rows are never split across devices at the MoE boundary, so the
same tokens are dropped on every mesh, under every dispatcher and however the batch is accumulated.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from ernie_jax.moe.routing import Routing
from ernie_jax.sharding import constrain


def row_capacity(tokens: int, num_experts: int, k: int, capacity_factor: float) -> int:
    """Most assignments of one expert in a row of `tokens`: ceil(capacity_factor * tokens * k / E), at most `tokens`."""
    return min(tokens, math.ceil(capacity_factor * tokens * k / num_experts))


def device_capacity(tokens: int, num_experts: int, k: int, capacity_factor: float, *, shards: int, sets: int = 1) -> int:
    """Most assignments that the experts of one of `shards` devices take from a row; of several sets of experts, E of each."""
    # Rounding up once for each set: sum of ceil(a_i) <= ceil(sum of a_i) + sets - 1.
    return (row_capacity(tokens, num_experts, k, capacity_factor) + sets - 1) * (num_experts // shards)


def drop_padding(routing: Routing, valid: jax.Array, num_experts: int) -> Routing:
    """Send padding nowhere: it costs no expert work and counts as nobody's load."""
    keep = valid[..., None]
    return Routing(jnp.where(keep, routing.expert_index, num_experts), jnp.where(keep, routing.weights, 0.0))


def apply_capacity(routing: Routing, valid: jax.Array, num_experts: int, capacity_factor: float) -> tuple[Routing, jax.Array]:
    """Drop assignments beyond each expert's capacity in each row, in token order.

    The capacity of a row is ceil(capacity_factor * valid tokens * K / E): padding neither takes a place nor grows it.
    A dropped assignment gets weight 0 and the others keep theirs, as in the Paddle implementation.

    Args:
      routing: [B, T, K], padding already sent nowhere.
      valid: [B, T] bool.
      num_experts: E.
      capacity_factor: 1.0 is exactly the mean load.

    Returns:
      (routing with dropped assignments sent nowhere, number of dropped assignments as a float32 scalar).
    """
    index = constrain(routing.expert_index, "batch", "full_sequence", None)
    batch, tokens, k = index.shape
    limit = jnp.ceil(capacity_factor * valid.sum(1, dtype=jnp.float32) * k / num_experts).astype(jnp.int32)
    hits = (index.reshape(batch, tokens * k, 1) == jnp.arange(num_experts, dtype=index.dtype)).astype(jnp.int32)
    # Place of each assignment in its expert's queue; only the column of its own expert counts.
    place = jnp.sum(jnp.cumsum(hits, axis=1) * hits, axis=-1).reshape(batch, tokens, k)
    routed = index < num_experts
    keep = routed & (place <= limit[:, None, None])
    dropped = jnp.sum(routed & ~keep, dtype=jnp.float32)
    return Routing(jnp.where(keep, index, num_experts), jnp.where(keep, routing.weights, 0.0)), dropped
