"""A step of AdamW by the native kernels, in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ernie_jax.native.library import ffi_call

Array = jax.Array


def adamw_step(
    grad: Array,
    value: Array,
    moments: tuple[Array, Array],
    *,
    scale: ArrayLike,
    unbias: tuple[Array, Array],
    rate: Array,
    finite: ArrayLike,
    betas: tuple[float, float],
    eps: float,
    decay: float,
) -> tuple[Array, Array, Array]:
    """One parameter's step in one pass over memory, into the buffers of its arguments where nobody else needs those.

    Args:
      grad, value: of one shape.
      moments: first and second, of the same.
      scale: of the gradient, scalar.
      unbias: 1 / (1 - b^t) of either moment.
      rate: learning rate.
      finite: bool, whether the step counts.
      betas: of the moments.
      eps: added to the root.
      decay: of the value, 0 for none.

    Returns:
      (value, first moment, second moment); where not `finite`, exactly the old ones.
    """
    now = jnp.stack([jnp.asarray(x, jnp.float32) for x in (scale, *unbias, rate, finite)])
    shapes = (jax.ShapeDtypeStruct(value.shape, jnp.float32),) * 3
    step = ffi_call("ernie_adamw", shapes, aliases={1: 0, 2: 1, 3: 2})
    fixed = {name: np.float32(x) for name, x in zip(("b1", "b2", "eps", "decay"), (*betas, eps, decay), strict=True)}
    new_value, first, second = step(grad, value, *moments, now, **fixed)
    return new_value, first, second
