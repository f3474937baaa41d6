"""Normalisation layers. B batch, T tokens, D features."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ernie_jax.nn.dtypes import DtypePolicy
from ernie_jax.nn.parameter import ones, parameter, zeros


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm of the last dimension: `scale * cast(x / sqrt(mean(x^2) + eps))`.

    Statistics are float32 and the result is cast to x's format before the scale multiplies it, the order transformers uses.
    """
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return scale.astype(x.dtype) * normed.astype(x.dtype)


class RMSNorm(nnx.Module):
    """RMS norm with a learned scale [D]."""

    def __init__(self, dim: int, *, eps: float, dtypes: DtypePolicy, rngs: nnx.Rngs, stack: int | None = None) -> None:
        self.eps = eps
        self.scale = parameter(rngs, (dim,), ("norm",), init=ones, dtype=dtypes.param, stack=stack)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D]."""
        return rms_norm(x, self.scale[...], self.eps)


class LayerNorm(nnx.Module):
    """Layer norm with scale and bias [D] (vision tower and resampler)."""

    def __init__(self, dim: int, *, eps: float, dtypes: DtypePolicy, rngs: nnx.Rngs, stack: int | None = None) -> None:
        self.eps = eps
        self.scale = parameter(rngs, (dim,), ("norm",), init=ones, dtype=dtypes.param, stack=stack)
        self.bias = parameter(rngs, (dim,), ("norm",), init=zeros, dtype=dtypes.param, stack=stack)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D]; statistics in float32."""
        x32 = x.astype(jnp.float32)
        centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        normed = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + self.eps)
        return (normed * self.scale[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(x.dtype)
