"""The variable-resolution resampler: patch features to the token stream. G devices' shares, n patches and k token rows of a share,
D vision width, m merge size, H model width.

m x m patches become one row, pairs of frames become one row, and an MLP brings it to the width of the language model.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from ernie_jax.config.compute import ComputeConfig
from ernie_jax.config.model import ModelConfig
from ernie_jax.nn.dtypes import DtypePolicy
from ernie_jax.nn.linear import Linear
from ernie_jax.nn.norm import LayerNorm, RMSNorm


class Projection(nnx.Module):
    """Linear, exact GELU, linear, layer norm."""

    def __init__(self, inputs: int, width: int, initializer_range: float, dtypes: DtypePolicy, *, rngs: nnx.Rngs) -> None:
        axes = (None, "vision_mlp")
        linear = functools.partial(Linear, axes=axes, initializer_range=initializer_range, dtypes=dtypes, rngs=rngs)
        self.fc1 = linear(inputs, width)
        self.fc2 = linear(width, width)
        self.norm = LayerNorm(width, eps=1e-6, dtypes=dtypes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[rows, inputs] -> [rows, width]."""
        return self.norm(self.fc2(jax.nn.gelu(self.fc1(x), approximate=False)))


class Resampler(nnx.Module):
    """Spatial merge, temporal pairs, projection, RMS norm."""

    def __init__(self, config: ModelConfig, compute: ComputeConfig, *, rngs: nnx.Rngs) -> None:
        vision = config.vision
        assert vision is not None
        dtypes = DtypePolicy.of(compute)
        self.width = vision.hidden_size * vision.spatial_merge_size**2
        init = vision.initializer_range
        self.spatial = Projection(self.width, self.width, init, dtypes, rngs=rngs)
        self.temporal = Projection(2 * self.width, self.width, init, dtypes, rngs=rngs)
        self.mlp = Linear(
            self.width, config.hidden_size, axes=("vision_mlp", "embed"), initializer_range=init, dtypes=dtypes, rngs=rngs
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtypes=dtypes, rngs=rngs)

    def __call__(self, features: jax.Array, pairs: jax.Array) -> jax.Array:
        """Patch features [G, n, D] and the two merged rows of each token row, [G, k, 2] -> [G, k, H]."""
        merged = self.spatial(features.reshape(features.shape[0], -1, self.width))
        both = [jnp.take_along_axis(merged, pairs[..., i, None], axis=1) for i in range(2)]
        return self.norm(self.mlp(self.temporal(jnp.concatenate(both, -1))))
