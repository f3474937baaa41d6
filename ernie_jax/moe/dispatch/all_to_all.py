"""Expert exchange by all-to-all with one fixed bucket for each peer. n tokens, G peers, C bucket rows, M slots a row, D model.

Forward: three all-to-alls a MoE layer (rows, their expert lists, results). Backward: three (the transposes). With formats in
the plan rows and lists share a buffer: two forward and two backward. With no capacity a bucket has n rows, enough for the worst
skew, so nothing is dropped; a capacity factor makes buckets smaller.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ernie_jax.moe.dispatch.buckets import (
    SlotRoute,
    collect_slots,
    fill_slots,
    rows_for_peers,
    slots_for_peers,
    tokens_of_slots,
    words_of_slots,
    words_of_tokens,
)
from ernie_jax.moe.dispatch.local import LocalDispatcher
from ernie_jax.moe.dispatch.packed_rows import return_rows, send_rows
from ernie_jax.moe.dispatch.protocol import Dispatcher, ExchangePlan, Residuals
from ernie_jax.moe.routing import Routing


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExchangeResiduals:
    """The way back: that of the next dispatcher on the expert's side, and each token's places on the sender's side."""

    local: Residuals
    route: SlotRoute

    def take_weights(self) -> tuple[jax.Array, Self]:
        """See `Residuals`."""
        weights, local = self.local.take_weights()
        return weights, replace(self, local=local)


@dataclass(frozen=True)
class AllToAllDispatcher:
    """Exact exchange with static buckets; runs on every backend.

    Attributes:
      plan: of the exchange.
      groups: places on the axis that exchange with one another, G in each group; None for the whole axis.
      inner: what takes over where the rows arrive; None for the local sort.
    """

    plan: ExchangePlan
    groups: tuple[tuple[int, ...], ...] | None = None
    inner: Dispatcher | None = None

    def _next(self) -> Dispatcher:
        return self.inner or LocalDispatcher(self.plan.of_device)

    def _exchange(self, buffer: jax.Array) -> jax.Array:
        """[G, C, ...] with one bucket a peer -> [G, C, ...] with the bucket each peer sent here."""
        with jax.named_scope("moe_exchange"):
            return jax.lax.all_to_all(
                buffer, self.plan.axis, split_axis=0, concat_axis=0, tiled=True, axis_index_groups=self.groups
            )

    def spread(self, words: jax.Array, lists: jax.Array | None, route: SlotRoute) -> jax.Array:
        """See `Mover`."""
        send = words_of_slots(words, lists, route)
        return self._exchange(send.reshape(self.plan.shards, -1, send.shape[-1])).reshape(send.shape)

    def gather(self, words: jax.Array, route: SlotRoute) -> jax.Array:
        """See `Mover`."""
        return words_of_tokens(self._exchange(words.reshape(self.plan.shards, -1, words.shape[-1])).reshape(words.shape), route)

    def dispatch(self, x: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array, ExchangeResiduals]:
        """x [n, D] -> rows [G C M, D]; see `Dispatcher`."""
        n, dim = x.shape
        peers, experts = self.plan.shards, self.plan.experts_per_shard
        bucket = n if self.plan.bucket_rows is None else min(n, self.plan.bucket_rows)
        with jax.named_scope("moe_buckets"):
            rows = rows_for_peers(routing.expert_index, self.plan)
            slot = rows.place + jnp.arange(peers, dtype=jnp.int32) * bucket
            token = checkpoint_name(tokens_of_slots(rows, slot, peers * bucket), "expert_sort")
            route = SlotRoute(token, jnp.repeat(jnp.arange(peers, dtype=jnp.int32), bucket), slot, rows.needed)
            index, weights = slots_for_peers(routing, self.plan)
        if self.plan.formats is None:
            with jax.named_scope("moe_buckets"):
                send = fill_slots(x, token, slot, rows.needed).reshape(peers, bucket, dim)
                lists = self._lists(index, weights, token, bucket)
            received, lists = (checkpoint_name(self._exchange(a), "expert_received") for a in (send, lists))
            slots = lists.shape[-1] // 2
            # An empty place announces expert E_local, which the local sort sends nowhere.
            here = Routing(
                jax.lax.stop_gradient(lists[..., :slots]).astype(jnp.int32).reshape(peers * bucket, slots),
                lists[..., slots:].reshape(peers * bucket, slots),
            )
            received = received.reshape(peers * bucket, dim)
        else:
            received, chosen, arrived = send_rows(self, self.plan.formats, x, index, weights, route, experts)
            here = Routing(chosen, arrived)
        assert here.expert_index.shape[-1] <= max(experts, 1)
        sorted_rows, sizes, local = self._next().dispatch(received, here)
        return sorted_rows, sizes, ExchangeResiduals(local, route)

    def _lists(self, index: jax.Array, weights: jax.Array, token: jax.Array, bucket: int) -> jax.Array:
        """[G, C, 2 M] float32 expert indices and weights of each bucket row, packed so that one exchange carries both."""
        n, peers, slots = index.shape
        # Row s of the buffer belongs to peer s // bucket; empty rows (token = n) take the added last entry.
        peer = jnp.repeat(jnp.arange(peers), bucket)
        flat = jnp.minimum(token, n) * peers + peer
        padded_index = jnp.concatenate([index.reshape(n * peers, slots), jnp.full((peers, slots), self.plan.experts_per_shard)])
        padded_weights = jnp.concatenate([weights.reshape(n * peers, slots), jnp.zeros((peers, slots), weights.dtype)])
        lists = jnp.concatenate([padded_index[flat].astype(jnp.float32), padded_weights[flat].astype(jnp.float32)], -1)
        return lists.reshape(peers, bucket, 2 * slots)

    def combine(self, outputs: jax.Array, residuals: Any) -> jax.Array:
        """outputs -> [n, D]: weighted on the expert's side, one row back for each (token, peer), added on the sender's side."""
        combined, route = self._next().combine(outputs, residuals.local), residuals.route
        if self.plan.formats is not None:
            return return_rows(self, self.plan.formats, combined, route)
        back = self._exchange(combined.reshape(self.plan.shards, -1, combined.shape[-1]))
        return collect_slots(back.reshape(-1, back.shape[-1]), route.token, route.slot, route.needed)
