"""A computation that every device of the mesh does on a share of its own: data parallelism over all axes, model axes included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ernie_jax.sharding import BATCH_AXES, MODEL_AXES, Layout


def on_every_device(body: Callable[[Any, Any], Any], weights: Any, items: Any, layout: Layout | None) -> Any:
    """`body(weights, items)` with the items split over every device and the weights whole on each.

    The gradient of the weights is summed over all devices, by the transpose of their replication.

    Args:
      body: a function of pytrees, whose results keep the two leading axes of `items`; it communicates nothing.
      weights: pytree of arrays.
      items: pytree of arrays [S, M, ...], S a multiple of the batch shards and M of the devices behind one batch shard.
      layout: mesh and rules; None for one device.

    Returns:
      What `body` returns, arrays [S, M, ...].
    """
    if layout is None or layout.mesh.size == 1:
        return body(weights, items)
    spread = PartitionSpec(BATCH_AXES, MODEL_AXES)
    # The check of varying axes fails to lower inside manual pipeline stages; tests compare gradients with one device instead.
    return jax.shard_map(body, mesh=layout.mesh, in_specs=(PartitionSpec(), spread), out_specs=spread, check_vma=False)(
        weights, items
    )
