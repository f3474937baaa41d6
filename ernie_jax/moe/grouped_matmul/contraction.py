"""The matrix product inside the backends' loops and kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def contract(a: jax.Array, b: jax.Array, axes: tuple[int, int], precision: str | None) -> jax.Array:
    """Two matrices summed over axis `axes[0]` of a and `axes[1]` of b, accumulated in float32."""
    dims = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)
