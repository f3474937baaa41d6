"""Parallel building blocks that are generic over the function they run."""

from ernie_jax.parallel.compressed import Compression, HeldBack, compressed_sum, make_compression, nothing_held
from ernie_jax.parallel.every_device import on_every_device
from ernie_jax.parallel.remat import rematerialize

__all__ = [
    "Compression",
    "HeldBack",
    "compressed_sum",
    "make_compression",
    "nothing_held",
    "on_every_device",
    "rematerialize",
]
