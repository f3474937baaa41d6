"""What the cast to FP8 loses: numbers beyond the largest, and numbers that become zero. R rows, D width."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ernie_jax.nn.fp8.formats import saturation_bound
from ernie_jax.nn.fp8.quantized import Quantized, spread


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Fp8Counts:
    """Sums over the numbers that were cast; they add up over microbatches and devices. Scalars, or one entry an operand.

    Attributes:
      values: how many there were.
      saturated: of them, not finite, or beyond the largest number by more than rounding takes back.
      nonzero: not zero before the cast.
      lost: of those, zero after it.
    """

    values: jax.Array
    saturated: jax.Array
    nonzero: jax.Array
    lost: jax.Array

    @property
    def overflow(self) -> jax.Array:
        """Share of the numbers that saturated, 0 to 1."""
        return self.saturated / jnp.maximum(self.values, 1.0)

    @property
    def underflow(self) -> jax.Array:
        """Share of the numbers other than zero that became zero, 0 to 1."""
        return self.lost / jnp.maximum(self.nonzero, 1.0)


def count_losses(x: jax.Array, cast: Quantized, rows: jax.Array) -> Fp8Counts:
    """Compare x [R, D] with what became of it, in the rows where `rows` [R] is true."""
    x = jax.lax.stop_gradient(x).astype(jnp.float32)
    scaled = jnp.abs(x) / spread(cast.scales, cast.tile, x.shape)
    saturated = ~(scaled <= saturation_bound(cast.values.dtype))
    nonzero = x != 0
    lost = nonzero & (cast.values.astype(jnp.float32) == 0)

    def count(mask: jax.Array) -> jax.Array:
        # By row in integers: a float32 sum of ones ends at 2^24.
        return jnp.sum(jnp.sum(mask & rows[:, None], axis=1, dtype=jnp.int32).astype(jnp.float32))

    return Fp8Counts(count(jnp.ones_like(nonzero)), count(saturated), count(nonzero), count(lost))
