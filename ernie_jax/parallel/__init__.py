"""Parallel building blocks that are generic over the function they run."""

from ernie_jax.parallel.remat import rematerialize

__all__ = ["rematerialize"]
