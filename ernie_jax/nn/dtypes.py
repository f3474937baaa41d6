"""The dtype policy: which number format each part of the computation uses."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ernie_jax.config.compute import ComputeConfig


@dataclass(frozen=True)
class DtypePolicy:
    """Formats by role. Routers, norm statistics, softmax and losses are float32 whatever the policy says.

    Attributes:
      param: storage of trained parameters (routers and their biases stay float32).
      compute: inputs of matrix products and activations between them.
      router: gate weights, correction bias, probabilities.
    """

    param: DTypeLike = jnp.float32
    compute: DTypeLike = jnp.float32
    router: DTypeLike = jnp.float32

    @classmethod
    def of(cls, compute: ComputeConfig) -> DtypePolicy:
        """The policy a compute configuration asks for."""
        return cls(param=jnp.dtype(compute.param_dtype), compute=jnp.dtype(compute.dtype))

    def cast(self, x: jax.Array) -> jax.Array:
        """`x` in the compute format."""
        return x.astype(self.compute)
