"""The two formats. E4M3: 3 bits of fraction, up to 448, no infinity. E5M2: 2 bits of fraction, up to 57,344."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike

E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)

# By the names that a configuration uses.
FP8_DTYPES = {"e4m3": E4M3, "e5m2": E5M2}


def largest(dtype: DTypeLike) -> float:
    """The largest finite number of an FP8 format: 448 or 57,344."""
    return float(jnp.finfo(dtype).max)


def saturation_bound(dtype: DTypeLike) -> float:
    """Magnitudes above this do not round to the largest number but past it: half a step beyond, 464 or 61,440."""
    info = jnp.finfo(dtype)
    return float(info.max) + 2.0 ** (int(info.maxexp) - 2 - int(info.nmant))
