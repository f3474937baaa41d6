"""The vision tower: patches of images and video frames to features. N patches, D width, h heads, d head width, m merge size.

Attention is within one frame (`frame_ids`), positions are two-dimensional, rotated pairs are half-split.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ernie_jax.config.compute import ComputeConfig
from ernie_jax.config.model import VisionConfig
from ernie_jax.nn.activation import ACTIVATION_FUNCTIONS
from ernie_jax.nn.dtypes import DtypePolicy
from ernie_jax.nn.linear import Linear
from ernie_jax.nn.norm import LayerNorm
from ernie_jax.nn.rope import inverse_frequencies, rotate_half_split


def patch_coordinates(grid_thw: np.ndarray, merge_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Where each patch stands, in the order the processor emits them: merge blocks row by row, m x m patches in each.

    Args:
      grid_thw: [images, 3] patches along time, height and width of each image or video.
      merge_size: m.

    Returns:
      (coordinates [N, 2] of row and column, frame_ids [N] counting frames from 1).

    Raises:
      ValueError: a grid whose height or width m does not divide.
    """
    coordinates, frames, frame = [], [], 0
    for time, height, width in np.asarray(grid_thw).tolist():
        if height % merge_size or width % merge_size:
            raise ValueError(f"grid {(time, height, width)}: height and width must be multiples of the merge size {merge_size}")
        rows, columns = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
        blocks = (height // merge_size, merge_size, width // merge_size, merge_size)
        order = [a.reshape(blocks).transpose(0, 2, 1, 3).reshape(-1) for a in (rows, columns)]
        for _ in range(time):
            frame += 1
            coordinates.append(np.stack(order, -1))
            frames.append(np.full(height * width, frame))
    return np.concatenate(coordinates).astype(np.int32), np.concatenate(frames).astype(np.int32)


class VisionBlock(nnx.Module):
    """Pre-norm block: attention within a frame, then an MLP; biases everywhere."""

    def __init__(self, config: VisionConfig, dtypes: DtypePolicy, *, rngs: nnx.Rngs, stack: int) -> None:
        self.num_heads = config.num_heads
        self.hidden_act = config.hidden_act
        dim, width = config.hidden_size, config.intermediate_size

        def norm() -> LayerNorm:
            return LayerNorm(dim, eps=config.rms_norm_eps, dtypes=dtypes, rngs=rngs, stack=stack)

        def linear(inputs: int, outputs: int, axes: tuple[str, str]) -> Linear:
            return Linear(inputs, outputs, axes=axes, dtypes=dtypes, rngs=rngs, stack=stack)

        self.norm1 = norm()
        self.qkv = linear(dim, 3 * dim, ("vision_embed", "vision_heads"))
        self.proj = linear(dim, dim, ("vision_heads", "vision_embed"))
        self.norm2 = norm()
        self.fc1 = linear(dim, width, ("vision_embed", "vision_mlp"))
        self.fc2 = linear(width, dim, ("vision_mlp", "vision_embed"))

    def __call__(self, x: jax.Array, rope: tuple[jax.Array, jax.Array], seen: jax.Array) -> jax.Array:
        """[N, D] -> [N, D]; `seen` [N, N] tells which patches share a frame."""
        qkv = self.qkv(self.norm1(x)).reshape(x.shape[0], 3, self.num_heads, -1)
        q, k, v = rotate_half_split(qkv[:, 0], *rope), rotate_half_split(qkv[:, 1], *rope), qkv[:, 2]
        scores = jnp.einsum("nhd,mhd->hnm", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1).astype(v.dtype)
        x = x + self.proj(jnp.einsum("hnm,mhd->nhd", weights, v).reshape(x.shape))
        return x + self.fc2(ACTIVATION_FUNCTIONS[self.hidden_act](self.fc1(self.norm2(x))))


class VisionTower(nnx.Module):
    """Patch embedding, a scanned stack of blocks, final norm."""

    def __init__(self, config: VisionConfig, compute: ComputeConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.dtypes = DtypePolicy.of(compute)
        patch = config.in_channels * config.patch_size**2
        self.patch_embed = Linear(patch, config.hidden_size, axes=(None, "vision_embed"), bias=False, dtypes=self.dtypes, rngs=rngs)
        self.blocks = VisionBlock(config, self.dtypes, rngs=rngs, stack=config.depth)
        self.norm = LayerNorm(config.hidden_size, eps=config.rms_norm_eps, dtypes=self.dtypes, rngs=rngs)

    def __call__(self, pixel_values: jax.Array, coordinates: jax.Array, frame_ids: jax.Array) -> jax.Array:
        """Features of patches.

        Args:
          pixel_values: [N, channels * patch^2], normalised.
          coordinates: [N, 2] row and column of each patch in its frame.
          frame_ids: [N], equal within a frame.

        Returns:
          [N, D].
        """
        x = self.patch_embed(self.dtypes.cast(pixel_values))
        # Half of the rotated pairs turn by the row, half by the column.
        frequencies = inverse_frequencies(x.shape[-1] // self.config.num_heads // 2, self.config.rope_theta)
        angles = (coordinates.astype(jnp.float32)[:, :, None] * frequencies).reshape(x.shape[0], -1)
        rope = jnp.cos(angles), jnp.sin(angles)
        seen = frame_ids[:, None] == frame_ids[None]
        graphdef, state = nnx.split(self.blocks)

        def step(x: jax.Array, weights: nnx.State) -> tuple[jax.Array, None]:
            block: VisionBlock = nnx.merge(graphdef, weights)
            return block(x, rope, seen), None

        x, _ = jax.lax.scan(step, x, state)
        return self.norm(x)
