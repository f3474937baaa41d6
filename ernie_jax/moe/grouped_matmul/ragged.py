"""The product by `jax.lax.ragged_dot`, with spare rows made safe.

R rows, E groups, D contracted width, F output width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def ragged_product(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """[R, D] rows, [E, D, F] weights, [E] sizes -> [R, F]; grouped on TPU at large widths, E times the work elsewhere."""
    # What the primitive leaves in rows past the last group is up to each compiler, and so is what it reads from them.
    used = (jnp.arange(rows.shape[0]) < group_sizes.sum())[:, None]
    out = jax.lax.ragged_dot(jnp.where(used, rows, 0), weights, group_sizes, preferred_element_type=jnp.float32)
    return jnp.where(used, out, 0).astype(rows.dtype)
