"""The factor on the loss before the backward pass, found by trial: halved by a step that is not finite, doubled by many that are.

Powers of two throughout, so multiplying and dividing are exact: in the range of the number format a step with a scale equals the
step without, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ernie_jax.config.optimization import OptimizerConfig

# Beyond it float32 gains nothing.
LARGEST = 2.0**32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScale:
    """State of the scale.

    Attributes:
      scale: float32, a power of two from 1 to 2^32.
      finite_steps: int32, finite steps since it last changed.
    """

    scale: jax.Array
    finite_steps: jax.Array

    @classmethod
    def initial(cls, config: OptimizerConfig) -> LossScale | None:
        """At the configured start; None where there is to be no scale."""
        return None if config.loss_scale is None else cls(jnp.float32(config.loss_scale), jnp.int32(0))

    def after(self, finite: jax.Array, growth: int) -> LossScale:
        """After a step: halved and never below 1 where it was not finite, doubled after `growth` finite ones in a row."""
        finite_steps = jnp.where(finite, self.finite_steps + 1, 0)
        grown = finite_steps >= growth
        larger = jnp.where(grown, jnp.minimum(self.scale * 2.0, LARGEST), self.scale)
        scale = jnp.where(finite, larger, jnp.maximum(self.scale / 2.0, 1.0))
        return LossScale(scale, jnp.where(grown, 0, finite_steps))


def scaled(loss: jax.Array, scale: LossScale | None) -> jax.Array:
    """The loss as the backward pass gets it."""
    return loss if scale is None else loss * scale.scale


def unscaled(values: dict[str, jax.Array], scale: LossScale | None) -> dict[str, jax.Array]:
    """Gradients of the scaled loss as those of the loss."""
    return values if scale is None else {path: value / scale.scale for path, value in values.items()}
