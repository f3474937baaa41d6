"""Expert exchange by ragged all-to-all: only real rows cross the wire. n tokens, G peers, M slots a row, D model.

XLA:CPU has no ragged all-to-all, so there the dispatcher refuses; its offsets are plain functions of the table of counts and
are tested everywhere, with a stand-in exchange that copies by them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ernie_jax.moe.dispatch.all_to_all import ExchangeResiduals
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
from ernie_jax.moe.dispatch.protocol import ExchangePlan
from ernie_jax.moe.routing import Routing


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RaggedOffsets:
    """The four vectors [G] of one ragged exchange, as `jax.lax.ragged_all_to_all` takes them."""

    input_offsets: jax.Array
    send_sizes: jax.Array
    output_offsets: jax.Array
    recv_sizes: jax.Array


def ragged_offsets(counts: jax.Array, me: jax.Array) -> RaggedOffsets:
    """Offsets of the exchange in which device i sends counts[i, j] rows to device j, all buffers dense.

    Args:
      counts: [G, G] int32, the same on every device.
      me: this device's place in the group.

    Returns:
      Offsets by the receiver's buffer: rows arrive ordered by sender, so mine start after those of all earlier senders.
    """
    before_me = jnp.cumsum(counts, axis=0) - counts
    send = counts[me]
    return RaggedOffsets(jnp.cumsum(send) - send, send, before_me[me], counts[:, me])


Exchange = Callable[[jax.Array, jax.Array, RaggedOffsets, str], jax.Array]


def hardware_exchange(rows: jax.Array, output: jax.Array, offsets: RaggedOffsets, axis: str) -> jax.Array:
    """Send `rows` by `offsets` into `output` with the backend's ragged all-to-all (TPU and GPU)."""
    return jax.lax.ragged_all_to_all(
        rows,
        output,
        offsets.input_offsets,
        offsets.send_sizes,
        offsets.output_offsets,
        offsets.recv_sizes,
        axis_name=axis,
    )


def gathered_exchange(rows: jax.Array, output: jax.Array, offsets: RaggedOffsets, axis: str) -> jax.Array:
    """The same exchange by an all-gather and a selection: every backend runs it, at the price of moving everything.

    For checking offsets and gradients where no ragged all-to-all exists; never chosen by name of a dispatcher.
    """
    me = jax.lax.axis_index(axis)
    everyone = jax.lax.all_gather(rows, axis)
    starts, sizes, targets = (
        jax.lax.all_gather(v, axis)[:, me] for v in (offsets.input_offsets, offsets.send_sizes, offsets.output_offsets)
    )
    place = jnp.arange(output.shape[0])[:, None]
    inside = (place >= targets) & (place < targets + sizes)
    sender = jnp.argmax(inside, axis=1)
    source = jnp.clip(place[:, 0] - targets[sender] + starts[sender], 0, rows.shape[0] - 1)
    picked = everyone[sender, source]
    return jnp.where(inside.any(1).reshape((-1,) + (1,) * (rows.ndim - 1)), picked, output)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RaggedRoute(SlotRoute):
    """The ways of a fixed exchange, and the table of counts."""

    counts: jax.Array


@dataclass(frozen=True)
class RaggedDispatcher:
    """Exact exchange of exactly the rows that must move.

    `exchange` is the primitive that moves them; the default needs TPU or GPU.
    """

    plan: ExchangePlan
    exchange: Exchange = hardware_exchange

    def __post_init__(self) -> None:
        if self.exchange is hardware_exchange and jax.default_backend() == "cpu":
            raise ValueError(
                "dispatch='ragged' needs ragged_all_to_all, which XLA does not have on CPU; use dispatch='all_to_all' "
                "(exact as well) or 'replicated', or run on TPU or GPU"
            )

    def _local(self) -> LocalDispatcher:
        return LocalDispatcher(self.plan.of_device)

    def _send(self, rows: jax.Array, receive: int, counts: jax.Array) -> jax.Array:
        output = jnp.zeros((receive, *rows.shape[1:]), rows.dtype)
        with jax.named_scope("moe_exchange"):
            offsets = ragged_offsets(counts, jax.lax.axis_index(self.plan.axis))
            return self.exchange(rows, output, offsets, self.plan.axis)

    def spread(self, words: jax.Array, lists: jax.Array | None, route: RaggedRoute) -> jax.Array:
        """See `Mover`; places past the last row that arrives hold zeros."""
        return self._send(words_of_slots(words, lists, route), self.plan.shards * words.shape[0], route.counts)

    def gather(self, words: jax.Array, route: RaggedRoute) -> jax.Array:
        """See `Mover`: the transposed table of counts."""
        return words_of_tokens(self._send(words, route.token.shape[0], route.counts.T), route)

    def dispatch(self, x: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array, ExchangeResiduals]:
        """x [n, D] -> rows [G n M, D]; see `Dispatcher`."""
        n, peers = x.shape[0], self.plan.shards
        rows = rows_for_peers(routing.expert_index, self.plan)
        index, weights = slots_for_peers(routing, self.plan)
        sends = n * min(peers, routing.expert_index.shape[-1])
        slot = rows.place + (jnp.cumsum(rows.counts) - rows.counts)
        token = tokens_of_slots(rows, slot, sends)
        counts = jax.lax.all_gather(rows.counts, self.plan.axis)
        peer = jnp.clip(jnp.searchsorted(jnp.cumsum(rows.counts), jnp.arange(sends), side="right"), 0, peers - 1)
        route = RaggedRoute(token, peer.astype(jnp.int32), slot, rows.needed, counts)
        if self.plan.formats is None:
            received, here = self._as_they_are(x, index, weights, route)
        else:
            experts = self.plan.experts_per_shard
            received, chosen, arrived = send_rows(self, self.plan.formats, x, index, weights, route, experts)
            here = Routing(chosen, arrived)
        sorted_rows, sizes, local = self._local().dispatch(received, here)
        return sorted_rows, sizes, ExchangeResiduals(local, route)

    def _as_they_are(self, x: jax.Array, index: jax.Array, weights: jax.Array, route: RaggedRoute) -> tuple[jax.Array, Routing]:
        """(rows [G n, D] that arrive, their experts and weights [G n, M]), rows and lists in their own formats."""
        n, peers, slots = index.shape
        flat = jnp.minimum(route.token, n - 1) * peers + route.peer
        # Index + 1, so that the zeros of places nobody wrote mean "no expert" after arrival.
        announced = (index.reshape(n * peers, slots)[flat] + 1).astype(jnp.float32)
        lists = jnp.concatenate([announced, weights.reshape(n * peers, slots)[flat].astype(jnp.float32)], -1)
        received, lists = (
            checkpoint_name(self._send(a, peers * n, route.counts), "expert_received")
            for a in (fill_slots(x, route.token, route.slot, route.needed), lists)
        )
        chosen = jax.lax.stop_gradient(lists[:, :slots]).astype(jnp.int32) - 1
        return received, Routing(jnp.where(chosen < 0, self.plan.experts_per_shard, chosen), lists[:, slots:])

    def combine(self, outputs: jax.Array, residuals: Any) -> jax.Array:
        """outputs -> [n, D], the exchange run backwards: the transposed table of counts."""
        combined, route = self._local().combine(outputs, residuals.local), residuals.route
        if self.plan.formats is not None:
            return return_rows(self, self.plan.formats, combined, route)
        back = self._send(combined, route.token.shape[0], route.counts.T)
        return collect_slots(back, route.token, route.slot, route.needed)
