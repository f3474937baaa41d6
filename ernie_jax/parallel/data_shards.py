"""A function run on each data shard by itself, its arrays summed over the shards as one says. G data shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ernie_jax.parallel.compressed import Compression, Held, compressed_sum
from ernie_jax.sharding import Layout

# (what all shards have, rows of one) -> (arrays to sum compressed, what else to sum)
ShardBody = Callable[[Any, Any], tuple[dict[str, jax.Array], Any]]


def summed_over_data_shards(
    body: ShardBody, whole: Any, rows: Any, held: Held, layout: Layout, compression: Compression
) -> tuple[dict[str, jax.Array], Any, Held]:
    """Sums of what `body` gives on each data shard, the first part with few bytes on the wire.

    Under automatic sharding a gradient is summed by the time one can see it. So `body` runs with every mesh axis manual: it must
    ask for no layout and communicate nothing, and no other axis of the mesh may have more than one device.

    Args:
      body: the function of one shard.
      whole: pytree of arrays that each shard has whole.
      rows: pytree of arrays [A, B, ...] whose second axis is split over the shards.
      held: what each shard has held back [G, ...] (see `nothing_held`).
      layout: mesh.
      compression: of the first part.

    Returns:
      (sums of the first part, float32; sums of the second; held back).

    Raises:
      ValueError: a mesh with another axis than `data` above 1, with the sizes.
    """
    check_data_axis_alone(layout)

    def shard(whole: Any, rows: Any, held: Held) -> tuple[dict[str, jax.Array], Any, Held]:
        arrays, rest = body(whole, rows)
        sums, kept = compressed_sum(compression, arrays, jax.tree.map(lambda a: a[0], held), "data")
        return sums, jax.lax.psum(rest, "data"), jax.tree.map(lambda a: a[None], kept)

    everywhere, own = PartitionSpec(), PartitionSpec("data")
    return jax.shard_map(
        shard,
        mesh=layout.mesh,
        in_specs=(everywhere, PartitionSpec(None, "data"), own),
        out_specs=(everywhere, everywhere, own),
        check_vma=False,
    )(whole, rows, held)


def check_data_axis_alone(layout: Layout) -> None:
    """Raise ValueError for a mesh with another axis than `data` above 1, with the sizes."""
    others = {axis: size for axis, size in layout.mesh.shape.items() if axis != "data" and size > 1}
    if others:
        raise ValueError(
            f"gradient compression sums over the data axis alone, and the mesh has {others}; give all devices to `data`, or set "
            "config.optimizer.gradient_compression='none'"
        )


def nothing_held_by_shards(held: Held, shards: int) -> Held:
    """The same for each of G shards: arrays [G, ...]."""
    repeated: Held = jax.tree.map(lambda a: jnp.broadcast_to(a, (shards, *a.shape)), held)
    return repeated
