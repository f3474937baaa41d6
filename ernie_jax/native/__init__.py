"""Kernels of our own for CPUs, in C++: compiled for the processor at hand on their first use, called through XLA's FFI."""

from ernie_jax.native.library import load, missing, switched_off
from ernie_jax.native.products import contracted_rows, grouped_rows, grouped_weights, product

__all__ = ["contracted_rows", "grouped_rows", "grouped_weights", "load", "missing", "product", "switched_off"]
