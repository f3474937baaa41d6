"""Gather all tokens of the expert group, let each device do its experts' part, reduce-scatter. n tokens, G shards, K chosen.

Moves n G rows each way whatever the routing: right for decoding and for small groups. Formats of the plan are for the gather and
for its transpose; results are added on their way, so they travel in the compute format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ernie_jax.moe.dispatch.local import LocalDispatcher, LocalResiduals
from ernie_jax.moe.dispatch.packed_rows import send_rows
from ernie_jax.moe.dispatch.protocol import ExchangePlan
from ernie_jax.moe.routing import Routing


def own_experts(routing: Routing, first: jax.Array, count: int) -> Routing:
    """The part of a routing that goes to experts first .. first + count - 1, with indices counted from `first`.

    Choices of other experts (and of none) become `count` with weight 0. When a token chooses more experts than the device
    has, the K slots are packed into `count` of them, so that no row is made for a choice that cannot exist.
    """
    local = routing.expert_index - first
    mine = (local >= 0) & (local < count)
    index, weights = jnp.where(mine, local, count), jnp.where(mine, routing.weights, 0)
    if index.shape[-1] > count:
        # Sorting by "is mine" keeps the chosen slots; at most `count` of them exist, since a token's experts are distinct.
        keep = jnp.argsort(~mine, axis=-1, stable=True)[..., :count]
        index, weights = jnp.take_along_axis(index, keep, -1), jnp.take_along_axis(weights, keep, -1)
    return Routing(index, weights)


@dataclass(frozen=True)
class ReplicatedDispatcher:
    """All-gather of tokens, reduce-scatter of results over the expert axis."""

    plan: ExchangePlan

    def _local(self) -> LocalDispatcher:
        return LocalDispatcher(self.plan.of_device)

    def spread(self, words: jax.Array, lists: jax.Array | None, route: Any) -> jax.Array:
        """See `Mover`: every row to every device."""
        rows = words if lists is None else jnp.concatenate([words, lists[:, 0]], -1)
        with jax.named_scope("moe_exchange"):
            return jax.lax.all_gather(rows, self.plan.axis, tiled=True)

    def gather(self, words: jax.Array, route: Any) -> jax.Array:
        """See `Mover`: each device has its own rows back from every device, still to be added."""
        with jax.named_scope("moe_exchange"):
            back = jax.lax.all_to_all(words, self.plan.axis, split_axis=0, concat_axis=0, tiled=True)
        return jnp.swapaxes(back.reshape(self.plan.shards, -1, words.shape[-1]), 0, 1)

    def dispatch(self, x: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array, LocalResiduals]:
        """x [n, D] -> rows [G n min(K, E_local), D]; see `Dispatcher`."""
        if self.plan.formats is None:
            with jax.named_scope("moe_exchange"):
                x, index, weights = (
                    checkpoint_name(jax.lax.all_gather(a, self.plan.axis, tiled=True), "expert_received")
                    for a in (x, routing.expert_index, routing.weights)
                )
        else:
            lists = routing.expert_index[:, None], routing.weights[:, None]
            x, index, weights = send_rows(self, self.plan.formats, x, *lists, None, self.plan.num_experts)
        first = jax.lax.axis_index(self.plan.axis) * self.plan.experts_per_shard
        return self._local().dispatch(x, own_experts(Routing(index, weights), first, self.plan.experts_per_shard))

    def combine(self, outputs: jax.Array, residuals: LocalResiduals) -> jax.Array:
        """outputs -> [n, D], summed over the group's devices."""
        partial = self._local().combine(outputs, residuals)
        with jax.named_scope("moe_exchange"):
            return jax.lax.psum_scatter(partial, self.plan.axis, scatter_dimension=0, tiled=True)
