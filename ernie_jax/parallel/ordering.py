"""An order between computations that do not need each other's results, where the backend keeps none of its own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def after(values: Any, done: jax.Array, *, everywhere: bool = False) -> Any:
    """`values` unchanged, but known only once `done` is.

    A choice that is always the same is a need that no compiler can remove; a barrier may be dropped before scheduling.

    XLA:CPU orders the collectives of one computation, but not a collective and a branch or loop that has some inside, when
    neither needs the other: devices that begin with different ones wait for each other for ever. Other backends run everything
    in one order and need nothing.

    Args:
      values: pytree of arrays.
      done: array of numbers; of one device of several, the whole of it must be ready (it is reduced to one number).
      everywhere: on every backend, where the order itself is wanted.
    """
    if jax.default_backend() != "cpu" and not everywhere:
        return values
    bits = jax.lax.bitcast_convert_type(jnp.max(done).astype(jnp.float32), jnp.int32)
    # Always true, of NaN too, and nothing that a compiler would know.
    known = (bits | 1) != 0
    return jax.tree.map(lambda x: jnp.where(known, x, jnp.zeros_like(x)), values)
