"""Parallel building blocks that are generic over the function they run."""

from ernie_jax.parallel.every_device import on_every_device
from ernie_jax.parallel.ordering import after
from ernie_jax.parallel.remat import rematerialize

__all__ = ["after", "on_every_device", "rematerialize"]
