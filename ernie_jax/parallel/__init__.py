"""Parallel building blocks that are generic over the function they run."""

from ernie_jax.parallel.every_device import on_every_device
from ernie_jax.parallel.remat import rematerialize

__all__ = ["on_every_device", "rematerialize"]
