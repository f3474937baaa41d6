"""Kernels of our own for CPUs, in C++: compiled for the processor at hand on their first use, called through XLA's FFI."""

from ernie_jax.native.adamw import adamw_step
from ernie_jax.native.gates import gated_silu, gated_silu_gradient
from ernie_jax.native.library import ffi_call, load, missing, switched_off
from ernie_jax.native.products import contracted_rows, grouped_rows, grouped_weights, product

__all__ = [
    "adamw_step",
    "contracted_rows",
    "ffi_call",
    "gated_silu",
    "gated_silu_gradient",
    "grouped_rows",
    "grouped_weights",
    "load",
    "missing",
    "product",
    "switched_off",
]
