"""The precision of matrix products that is in force."""

from __future__ import annotations

import jax


def matmul_precision() -> str | None:
    """`jax_default_matmul_precision` as it stands, for a product that has a backward pass of its own.

    To be read with the forward pass and handed to both: the backward may be traced where another precision is in force.
    """
    precision: str | None = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    return precision
