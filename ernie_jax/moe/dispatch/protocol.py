"""What a dispatcher is. n tokens of this device, D model, K chosen, R rows, G expert shards, E_local = E / G experts a device.

A dispatcher runs inside `shard_map`, on the tokens and the experts of one device:

    rows, group_sizes, residuals = dispatcher.dispatch(x, routing)      # rows of this device's experts, sorted by expert
    y = dispatcher.combine(outputs, residuals)                          # [n, D], every token's weighted sum

or, where the caller weights the rows on the way,

    row_weights, residuals = residuals.take_weights()                   # [R], and `combine` now only adds

`rows` [R, D] has a static number of rows; the first sum(group_sizes) are real and the rest are spare, with any content.
Every dispatcher is exact: it drops nothing, since capacity was applied to the routing before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax

from ernie_jax.moe.dispatch.packed_rows import ExchangeFormats
from ernie_jax.moe.routing import Routing


@dataclass(frozen=True)
class ExchangePlan:
    """Static facts of one exchange.

    Attributes:
      num_experts: E over all devices.
      shards: G, devices of the expert axis.
      axis: name of the mesh axis the experts are split over.
      bucket_rows: most rows a device may send to one peer; None for as many as it has tokens (the exact default).
      expert_rows: most rows that the experts of one device may get; None for as many as could be sent to it.
      formats: in which rows, results and gradients travel; None leaves them as they are.
      nodes: over how many nodes the expert axis spreads, consecutive devices of it to a node; `two_level` alone reads it.
    """

    num_experts: int
    shards: int
    axis: str = "expert"
    bucket_rows: int | None = None
    expert_rows: int | None = None
    formats: ExchangeFormats | None = None
    nodes: int | None = None

    @property
    def experts_per_shard(self) -> int:
        """E_local, experts of one device."""
        return self.num_experts // self.shards

    @property
    def of_device(self) -> ExchangePlan:
        """Of the sort among one device's experts, once rows have arrived."""
        return ExchangePlan(num_experts=self.experts_per_shard, shards=1, expert_rows=self.expert_rows)


class Residuals(Protocol):
    """What a dispatcher needs to bring results back."""

    def take_weights(self) -> tuple[jax.Array, Any]:
        """(weight of each row [R], residuals of a `combine` that only adds): to weight rows where they are narrow.

        A product with the experts' last matrix is linear, so its input may carry the weights; then neither pass needs the
        unweighted outputs.
        """
        ...


class Dispatcher(Protocol):
    """Moves tokens to their experts and results back."""

    @property
    def plan(self) -> ExchangePlan:
        """Static facts of the exchange."""
        ...

    def dispatch(self, x: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array, Residuals]:
        """x [n, D], routing [n, K] with global expert indices -> (rows [R, D], group_sizes [E_local] int32, residuals)."""
        ...

    def combine(self, outputs: jax.Array, residuals: Any) -> jax.Array:
        """outputs [R, D] of the experts, in the order of `rows` -> [n, D]."""
        ...
