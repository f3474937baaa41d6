"""Kernels of our own for CPUs, in C++: compiled for the processor at hand on their first use, called through XLA's FFI."""

from ernie_jax.native.library import load, missing

__all__ = ["load", "missing"]
