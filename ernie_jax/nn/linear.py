"""A plain linear layer, for the vision tower and the resampler."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ernie_jax.nn.dtypes import DtypePolicy
from ernie_jax.nn.parameter import normal, parameter, zeros


class Linear(nnx.Module):
    """`x kernel + bias`, kernel [inputs, outputs]."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        axes: tuple[str | None, str | None],
        bias: bool = True,
        initializer_range: float = 0.02,
        dtypes: DtypePolicy,
        rngs: nnx.Rngs,
        stack: int | None = None,
    ) -> None:
        self.dtypes = dtypes
        self.kernel = parameter(rngs, (inputs, outputs), axes, init=normal(initializer_range), dtype=dtypes.param, stack=stack)
        self.bias = parameter(rngs, (outputs,), axes[1:], init=zeros, dtype=dtypes.param, stack=stack) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., inputs] -> [..., outputs]."""
        y = jnp.einsum("...i,io->...o", x, self.dtypes.cast(self.kernel[...]))
        return y if self.bias is None else y + self.dtypes.cast(self.bias[...])
