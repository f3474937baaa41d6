"""Where each expert stands among the weights. B batch, T tokens, K chosen, E experts of a modality, R layers of a stack.

Experts have two numbers. The router, its bias, the losses, the counts and the published files know an expert by its own number,
which never changes. Its weights stand at a place along the expert axis, and the devices hold equal runs of places: moving an
expert to another device changes its place, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx


class ExpertPlace(nnx.Variable):
    """[E] int32 (stacked: [R, E]), the place of each expert: state of the model, not a parameter; no optimiser ever sees it."""


def own_places(num_experts: int, stack: int | None = None) -> jax.Array:
    """The places that experts begin with: expert e at place e; [E], or [R, E] of a stack of R layers."""
    places = jnp.arange(num_experts, dtype=jnp.int32)
    return places if stack is None else jnp.tile(places, (stack, 1))


def to_places(expert_index: jax.Array, places: Sequence[jax.Array | None]) -> jax.Array:
    """Experts' numbers as places, for the experts of all modalities at once.

    Args:
      expert_index: [B, T, K]; expert e of set s is s E + e, and E times the number of sets goes nowhere.
      places: [E] of each set; None where no set's experts ever move.

    Returns:
      [B, T, K], where the expert at place p of set s is s E + p.
    """
    known = [place for place in places if place is not None]
    if not known:
        return expert_index
    assert len(known) == len(places), "either the experts of all modalities can move, or none"
    num_experts = known[0].shape[0]
    nowhere = jnp.full((1,), len(known) * num_experts, jnp.int32)
    table = jnp.concatenate([*(place + i * num_experts for i, place in enumerate(known)), nowhere])
    return jnp.take(table, expert_index, mode="clip")
