"""A function run on each data shard by itself, its arrays summed over the shards as one says.

G data shards. Over the other axes of the mesh an array of a shard is split into pieces as its spec says; the sum runs piece by
piece, each between the G devices that hold one piece. Devices over which an array is repeated all do the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ernie_jax.parallel.compressed import Compression, Held, HeldBack, compressed_sum, nothing_held
from ernie_jax.sharding import Layout

# (what all shards have, rows of one) -> (arrays to sum compressed, what else to sum)
ShardBody = Callable[[Any, Any], tuple[dict[str, jax.Array], Any]]
Specs = Mapping[str, PartitionSpec]


def summed_over_data_shards(
    body: ShardBody, whole: Any, rows: Any, held: Held, specs: Specs, layout: Layout, compression: Compression
) -> tuple[dict[str, jax.Array], Any, Held]:
    """Sums of what `body` gives on each data shard, the first part with few bytes on the wire.

    Under automatic sharding a gradient is summed by the time one can see it. So `body` runs with the mesh axis `data` manual; over
    the others it is sharded as anywhere else, and may exchange experts. On a mesh of the data axis alone it must ask for no layout.

    Args:
      body: the function of one shard.
      whole: pytree of arrays that each shard has whole.
      rows: pytree of arrays [A, B, ...] whose second axis is split over the shards.
      held: what each shard has held back (see `nothing_held_by_shards`).
      specs: of each array of the first part over the other axes of the mesh.
      layout: mesh.
      compression: of the first part.

    Returns:
      (sums of the first part, float32, by these specs; sums of the second; held back).

    Raises:
      ValueError: a mesh with pipeline stages, a spec that names the data axis.
    """
    check_sums_over_data(layout)
    _check_specs(specs)
    split = model_axes(layout)
    by_shard = {name: _of_shards(spec) for name, spec in specs.items()}

    def shard(whole: Any, rows: Any) -> tuple[dict[str, jax.Array], Any]:
        arrays, rest = body(whole, rows)
        if split:
            # Each device of a shard keeps its piece; left alone, the partitioner may bring an array together.
            mesh = layout.mesh_in_force
            arrays = {name: jax.lax.with_sharding_constraint(a, NamedSharding(mesh, specs[name])) for name, a in arrays.items()}
        return {name: a[None] for name, a in arrays.items()}, jax.lax.psum(rest, "data")

    everywhere, own = PartitionSpec(), PartitionSpec("data")
    arrays, rest = jax.shard_map(
        shard,
        mesh=layout.mesh,
        in_specs=(everywhere, PartitionSpec(None, "data")),
        out_specs=(own, everywhere),
        # Axes of one device have nothing to split; without others the body is one device's.
        axis_names={"data"} if split else set(layout.mesh.axis_names),
        check_vma=False,
    )(whole, rows)

    def pieces(arrays: dict[str, jax.Array], held: Held) -> tuple[dict[str, jax.Array], Held]:
        flat = jax.tree.map(lambda a: a.reshape(-1), held)
        sums, kept = compressed_sum(compression, {name: a[0] for name, a in arrays.items()}, flat, "data")
        return sums, jax.tree.map(lambda a, like: a.reshape(like.shape), kept, held)

    places = {name: by_shard[name] for name in held}
    sums, kept = jax.shard_map(
        pieces, mesh=layout.mesh, in_specs=(by_shard, places), out_specs=(dict(specs), places), check_vma=False
    )(arrays, held)
    return sums, rest, kept


def nothing_held_by_shards(
    compression: Compression, shapes: Mapping[str, tuple[int, ...]], specs: Specs, layout: Layout, least: int = 0
) -> Held:
    """What the shards have held back before the first sum, None of arrays that travel as they are.

    Of an array [...] in P1 x P2 x ... pieces: `of_array` [G, ...], and `of_sum` [G, P1, P2, ..., part]. Both are laid out as
    `held_specs` says. So whatever is held stays with its element or piece, and its shape tells of the pieces.

    Args:
      compression: of the sums.
      shapes: of the arrays.
      specs: of the arrays over other axes of the mesh than `data`.
      layout: mesh.
      least: arrays whose pieces have fewer elements than this travel as they are.
    """
    shards = layout.mesh.shape["data"]
    grids = {name: _grid(specs[name], len(shape), layout.mesh) for name, shape in shapes.items()}
    sizes = {name: math.prod(shape) // math.prod(grids[name]) for name, shape in shapes.items()}

    def of_shards(name: str, held: HeldBack | None) -> HeldBack | None:
        if held is None:
            return None
        of_sum = jnp.zeros((shards, *grids[name], held.of_sum.size), jnp.float32)
        return HeldBack(jnp.zeros((shards, *shapes[name]), jnp.float32), of_sum)

    return {name: of_shards(name, held) for name, held in nothing_held(compression, sizes, shards, least).items()}


def held_specs(held: Held, specs: Specs) -> Any:
    """The specs of what `nothing_held_by_shards` gives, in the same structure."""
    return {name: jax.tree.map(lambda _, name=name: _of_shards(specs[name]), kept) for name, kept in held.items()}


def held_by_arrays(held: Mapping[str, HeldBack], specs: Specs, layout: Layout) -> dict[str, HeldBack]:
    """The same held back in all, but by `of_array` alone: each device's part of the sum goes back to where it is in the array.

    For when the elements of the arrays change places, which parts of a sum, with no regard to dimensions, cannot follow.
    """

    def device(held: dict[str, HeldBack]) -> dict[str, HeldBack]:
        def back(own: HeldBack) -> HeldBack:
            part, of_array = own.of_sum.reshape(-1), own.of_array.reshape(-1)
            whole = jnp.zeros((layout.mesh.shape["data"] * part.size,), jnp.float32)
            whole = jax.lax.dynamic_update_slice(whole, part, (jax.lax.axis_index("data") * part.size,))
            of_array = of_array + whole[: of_array.size]
            return HeldBack(of_array.reshape(own.of_array.shape), jnp.zeros_like(own.of_sum))

        return {name: back(own) for name, own in held.items()}

    places = {name: _of_shards(specs[name]) for name in held}
    call = jax.shard_map(device, mesh=layout.mesh, in_specs=(places,), out_specs=places, check_vma=False)
    moved: dict[str, HeldBack] = call(dict(held))
    return moved


def check_sums_over_data(layout: Layout) -> None:
    """Raise ValueError for a mesh with pipeline stages."""
    stages = layout.mesh.shape["pipeline"]
    if stages > 1:
        raise ValueError(
            f"gradient compression sums over the data axis beside expert and tensor axes, and the mesh has pipeline={stages}; give "
            "these devices to another axis, or set config.optimizer.gradient_compression='none'"
        )


def model_axes(layout: Layout) -> tuple[str, ...]:
    """The axes of the mesh over which one data shard is spread, those of more than one device."""
    return tuple(axis for axis, size in layout.mesh.shape.items() if axis != "data" and size > 1)


def _check_specs(specs: Specs) -> None:
    wrong = {name: spec for name, spec in specs.items() if any("data" in _axes(part) for part in spec)}
    if wrong:
        name, spec = next(iter(wrong.items()))
        raise ValueError(
            f"gradient compression needs whole gradients in each data shard, and {name} with {len(wrong) - 1} more is split over "
            f"the data axis ({spec}); set config.mesh.zero to 0 or 1, or config.optimizer.gradient_compression='none'"
        )


def _axes(part: Any) -> tuple[str, ...]:
    return () if part is None else (part,) if isinstance(part, str) else tuple(part)


def _grid(spec: PartitionSpec, dimensions: int, mesh: Mesh) -> tuple[int, ...]:
    """Pieces along each dimension."""
    parts = (*spec, *(None,) * (dimensions - len(spec)))
    return tuple(math.prod(mesh.shape[axis] for axis in _axes(part)) for part in parts)


def _of_shards(spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec("data", *spec)
