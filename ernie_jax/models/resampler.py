"""The variable-resolution resampler: patch features to the token stream. N patches, D vision width, m merge size, H model width.

m x m patches become one row, pairs of frames become one row, and an MLP brings it to the width of the language model.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ernie_jax.config.compute import ComputeConfig
from ernie_jax.config.model import ModelConfig
from ernie_jax.nn.dtypes import DtypePolicy
from ernie_jax.nn.linear import Linear
from ernie_jax.nn.norm import LayerNorm, RMSNorm


def frame_pairs(grid_thw: np.ndarray, merge_size: int) -> np.ndarray:
    """Which merged rows make each output row: [rows, 2]; the two are equal for an image, consecutive frames for a video.

    Args:
      grid_thw: [images, 3] patches along time, height and width.
      merge_size: m.
    """
    pairs, start = [], 0
    for time, height, width in np.asarray(grid_thw).tolist():
        area = height * width // merge_size**2
        rows = start + np.arange(time * area).reshape(time, area)
        # The last frame of an odd number has no partner and is lost, as in the reference; processors pad to even.
        first, second = (rows, rows) if time == 1 else (rows[0 : time - 1 : 2], rows[1::2])
        pairs.append(np.stack([first.reshape(-1), second.reshape(-1)], -1))
        start += time * area
    return np.concatenate(pairs).astype(np.int32)


class Projection(nnx.Module):
    """Linear, exact GELU, linear, layer norm."""

    def __init__(self, inputs: int, width: int, dtypes: DtypePolicy, *, rngs: nnx.Rngs) -> None:
        linear = functools.partial(Linear, axes=(None, "vision_mlp"), dtypes=dtypes, rngs=rngs)
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
        self.spatial = Projection(self.width, self.width, dtypes, rngs=rngs)
        self.temporal = Projection(2 * self.width, self.width, dtypes, rngs=rngs)
        self.mlp = Linear(self.width, config.hidden_size, axes=("vision_mlp", "embed"), dtypes=dtypes, rngs=rngs)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtypes=dtypes, rngs=rngs)

    def __call__(self, features: jax.Array, pairs: jax.Array) -> jax.Array:
        """Patch features [N, D] and `frame_pairs` [rows, 2] -> [rows, H]."""
        merged = self.spatial(features.reshape(-1, self.width))
        return self.norm(self.mlp(self.temporal(jnp.concatenate([merged[pairs[:, 0]], merged[pairs[:, 1]]], -1))))
