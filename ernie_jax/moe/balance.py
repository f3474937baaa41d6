"""Load balance without a loss: the score-correction bias follows the measured load; how even loads are. E experts, G devices."""

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


def device_load(load: jax.Array, places: jax.Array, devices: int) -> jax.Array:
    """What the experts of each device have to do: [..., G] from the load and the place [..., E] of each expert.

    A device holds E / G places in sequence, the first device the first ones.
    """
    device = places // (load.shape[-1] // devices)
    return jnp.sum(jnp.where(device[..., None] == jnp.arange(devices), load[..., None], 0.0), axis=-2)
