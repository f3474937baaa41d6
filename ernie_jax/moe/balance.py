"""Load balance without a loss: the score-correction bias follows the measured load. E experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def update_bias(bias: jax.Array, load: jax.Array, rate: float) -> jax.Array:
    """`b_e += rate * sign(mean(load) - load_e)`, with sign(0) = 0; once after each optimiser step.

    The mean of the bias is not removed, as in the reference callback.

    Args:
      bias: [..., E] float32.
      load: [..., E], tokens dispatched to each expert since the last update, over the whole mesh and all microbatches.
      rate: step size; 0.001 in the published recipes.
    """
    load = load.astype(jnp.float32)
    return bias + rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)


def balance_rate(load: jax.Array) -> jax.Array:
    """Mean load over largest load, in (0, 1]; 1 is perfect balance, and no load at all counts as balanced."""
    largest = jnp.max(load, axis=-1)
    return jnp.where(largest > 0, jnp.mean(load, axis=-1) / jnp.maximum(largest, 1e-6), 1.0)
