"""The masked dense product: E times the work, plainly right, the oracle of the tests.

R rows, E groups, D contracted width, F output width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def dense_product(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """[R, D] rows, [E, D, F] weights, [E] sizes -> [R, F]; holds [E, R, F] in memory."""
    ends = jnp.cumsum(group_sizes)
    index = jnp.arange(rows.shape[0])
    owned = (index >= (ends - group_sizes)[:, None]) & (index < ends[:, None])  # [E, R]
    # A product with a zero mask would let NaN through: the rows themselves must be replaced.
    rows = jnp.where(owned.any(axis=0)[:, None], rows, 0)
    products = jnp.einsum("rd,edf->erf", rows, weights, preferred_element_type=jnp.float32)
    return jnp.where(owned[:, :, None], products, 0).sum(axis=0).astype(rows.dtype)
