"""The vision-language model: the text model with vision experts, a vision tower and a resampler. B batch, T tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ernie_jax.config.compute import ComputeConfig
from ernie_jax.config.model import ModelConfig
from ernie_jax.models.resampler import Resampler, frame_pairs
from ernie_jax.models.text import TextModel
from ernie_jax.models.vision_tower import VisionTower, patch_coordinates
from ernie_jax.sharding import Layout


class VisionLanguageModel(TextModel):
    """All parameters of ERNIE 4.5 VL; text goes through the text experts and image features come from `image_features`.

    Mixing the two in one stream is not built yet, so image and video tokens among the inputs are refused.
    """

    def __init__(
        self, config: ModelConfig, compute: ComputeConfig = ComputeConfig(), *, layout: Layout | None = None, rngs: nnx.Rngs
    ) -> None:
        super().__init__(config, compute, layout=layout, rngs=rngs)
        assert config.vision is not None
        self.vision_tower = VisionTower(config.vision, compute, rngs=rngs)
        self.resampler = Resampler(config, compute, rngs=rngs)

    def image_features(self, pixel_values: jax.Array, image_grid_thw: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """Features of images or videos.

        Args:
          pixel_values: [N, channels * patch^2], normalised patches in processor order.
          image_grid_thw: [images, 3] patches along time, height and width.

        Returns:
          (vision tower output [N, D], rows for the token stream [rows, H]).

        Raises:
          ValueError: a grid that does not cover the patches.
        """
        grid = np.asarray(image_grid_thw)
        patches = int(grid.prod(-1).sum())
        if patches != pixel_values.shape[0]:
            raise ValueError(f"image_grid_thw covers {patches} patches, pixel_values has {pixel_values.shape[0]}")
        merge = self.vision_tower.config.spatial_merge_size
        coordinates, frame_ids = (jnp.asarray(a) for a in patch_coordinates(grid, merge))
        features = self.vision_tower(pixel_values, coordinates, frame_ids)
        return features, self.resampler(features, jnp.asarray(frame_pairs(grid, merge)))
