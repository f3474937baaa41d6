"""How every weight is created: value, format and logical axes in one call."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

Initializer = Callable[[jax.Array, tuple[int, ...], DTypeLike], jax.Array]


def normal(stddev: float) -> Initializer:
    """Normal initialisation with a fixed deviation, as all matrices of ERNIE use."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        return (jax.random.normal(key, shape, jnp.float32) * stddev).astype(dtype)

    return init


def ones(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """All ones; the key is not used."""
    return jnp.ones(shape, dtype)


def zeros(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """All zeros; the key is not used."""
    return jnp.zeros(shape, dtype)


def parameter(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    *,
    init: Initializer,
    dtype: DTypeLike,
    stack: int | None = None,
) -> nnx.Param:
    """A trained weight that carries its logical axes as variable metadata `axes`.

    Args:
      rngs: source of the key (stream `params`).
      shape: shape of one layer's weight.
      axes: the logical name of each dimension, None for one that is never sharded.
      init: initialiser, called with (key, full shape, dtype).
      dtype: storage format.
      stack: number of layers held in one array under a leading `layers` axis; None for a single layer.
    """
    assert len(shape) == len(axes), (shape, axes)
    full, names = (shape, axes) if stack is None else ((stack, *shape), ("layers", *axes))
    return nnx.Param(init(rngs.params(), full, dtype), axes=names)
