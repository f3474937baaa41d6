"""Parallel building blocks that are generic over the function they run."""

from ernie_jax.parallel.compressed import Compression, Held, HeldBack, compressed_sum, make_compression, nothing_held
from ernie_jax.parallel.data_shards import (
    check_sums_over_data,
    held_by_arrays,
    held_specs,
    model_axes,
    nothing_held_by_shards,
    summed_over_data_shards,
)
from ernie_jax.parallel.every_device import on_every_device
from ernie_jax.parallel.ordering import after
from ernie_jax.parallel.remat import rematerialize

__all__ = [
    "Compression",
    "Held",
    "HeldBack",
    "after",
    "check_sums_over_data",
    "compressed_sum",
    "held_by_arrays",
    "held_specs",
    "make_compression",
    "model_axes",
    "nothing_held",
    "nothing_held_by_shards",
    "on_every_device",
    "rematerialize",
    "summed_over_data_shards",
]
