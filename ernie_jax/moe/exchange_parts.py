"""In which parts a device's tokens are exchanged: chunks of tokens, and the experts of one modality or of all.

n tokens of a device, K chosen, E experts of a modality (a set), G devices of the expert axis.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import jax.numpy as jnp

from ernie_jax.moe.dispatch import ExchangePlan
from ernie_jax.moe.routing import Routing

# Sets of experts in the order in which their rows travel; text is set 0.
_FIRST = {"text_first": (0, 1), "vision_first": (1, 0)}


@dataclass(frozen=True)
class SetExchange:
    """One exchange of a chunk.

    Attributes:
      sets: numbers of the sets of experts that it serves.
      plan: its static facts.
    """

    sets: tuple[int, ...]
    plan: ExchangePlan


def set_exchanges(order: str, sets: int, plan: ExchangePlan) -> list[SetExchange]:
    """The exchanges of a chunk, in the order in which they start: one for all sets, or one for each in buckets of its own.

    A bucket of its own must hold a batch of that modality alone, so apart the padded buffers are `sets` times as large; of
    `ragged`, which pads nothing, they are not. Where all experts are at hand there is nothing to exchange, and one sort does.
    """
    if order == "together" or sets == 1 or plan.shards == 1:
        return [SetExchange(tuple(range(sets)), plan)]
    own = replace(plan, num_experts=plan.num_experts // sets)
    return [SetExchange((number,), own) for number in _FIRST[order]]


def routing_of(exchange: SetExchange, routing: Routing, sets: int, plan: ExchangePlan) -> Routing:
    """The part of a routing over all sets that one exchange serves, its experts numbered as its own plan has them.

    Args:
      exchange: of one set or of all.
      routing: [n, K], numbered as `shard_major` does.
      sets: how many there are.
      plan: of all sets.
    """
    if len(exchange.sets) == sets:
        return routing
    (own,) = exchange.sets
    together, each = plan.experts_per_shard, exchange.plan.experts_per_shard
    device, place = routing.expert_index // together, routing.expert_index % together
    mine = (place // each == own) & (routing.expert_index < plan.num_experts)
    index = jnp.where(mine, device * each + place % each, exchange.plan.num_experts)
    return Routing(index, jnp.where(mine, routing.weights, 0))


def chunk_slices(tokens: int, chunks: int) -> list[slice]:
    """`tokens` in at most `chunks` runs, none empty, whose lengths differ by one at most."""
    count = max(1, min(tokens, chunks))
    ends = [tokens * i // count for i in range(count + 1)]
    return [slice(start, end) for start, end in itertools.pairwise(ends)]
