"""The vision-language model: the text model with vision experts, a vision tower and a resampler. B batch, T tokens, H width.

S groups of rows, M devices of a group, n patches and k token rows of a device, C patch values.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from flax import nnx

from ernie_jax.config.compute import ComputeConfig
from ernie_jax.config.model import ModelConfig
from ernie_jax.data.vision.spread import spread_images
from ernie_jax.models.decoder import Collect
from ernie_jax.models.feature_placement import place_features
from ernie_jax.models.inputs import TextInputs, text_inputs
from ernie_jax.models.multimodal_inputs import multimodal_inputs
from ernie_jax.models.output import ModelOutput
from ernie_jax.models.resampler import Resampler
from ernie_jax.models.text import TextModel
from ernie_jax.models.vision_inputs import MultimodalInputs, VisionInputs
from ernie_jax.models.vision_tower import VisionTower
from ernie_jax.nn.kv_cache import KVCache
from ernie_jax.nn.rope import multimodal_rope_tables
from ernie_jax.parallel import on_every_device
from ernie_jax.sharding import Layout, constrain, constrain_in_stage


class VisionLanguageModel(TextModel):
    """ERNIE 4.5 VL: images and videos become rows of the token stream, and each token goes to the experts of its modality."""

    def __init__(
        self, config: ModelConfig, compute: ComputeConfig = ComputeConfig(), *, layout: Layout | None = None, rngs: nnx.Rngs
    ) -> None:
        super().__init__(config, compute, layout=layout, rngs=rngs)
        assert config.vision is not None
        self.vision_tower = VisionTower(config.vision, compute, rngs=rngs)
        self.resampler = Resampler(config, compute, rngs=rngs)

    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        position_ids: jax.Array | None = None,
        *,
        pixel_values: Any = None,
        image_grid_thw: Any = None,
        pixel_values_videos: Any = None,
        video_grid_thw: Any = None,
        mm_token_type_ids: Any = None,
        moe_mm_token_type_ids: Any = None,
        cache: KVCache | None = None,
        output_hidden_states: bool = False,
    ) -> ModelOutput:
        """Logits of every position; keyword names are those of `transformers`.

        Args:
          input_ids, attention_mask, segment_ids, cache, output_hidden_states: see `TextModel.__call__`. Each image or video
            takes one run of placeholders, as many as its grid gives rows.
          position_ids: [3, B, T] time, height and width, or [B, T]; worked out from the tokens and grids by default; what follows
            images in a cache begins behind their last position.
          pixel_values: [N, C] patches of all images, one after another, row after row of the batch.
          image_grid_thw: [images, 3] patches of each along time, height and width.
          pixel_values_videos, video_grid_thw: the same of videos.
          mm_token_type_ids: [B, T] 0 text, 1 image, 2 video placeholders; told from input_ids by default.
          moe_mm_token_type_ids: [B, T] the same, with the start and end markers counted to the image or video: who goes to the
            vision experts. Without it all tokens go to the text experts, as in `transformers`.

        Returns:
          ModelOutput; router logits are each token's of its own modality.

        Raises:
          ValueError: shapes or values that do not fit: patches and grids, grids and placeholders; images given as tracers.
        """
        if position_ids is not None and not isinstance(position_ids, jax.Array):
            position_ids = np.asarray(position_ids)
        three = position_ids is not None and position_ids.ndim == 3
        checked = text_inputs(self.config, input_ids, attention_mask, segment_ids, None if three else position_ids, cache)
        assert self.config.vision is not None
        inputs = multimodal_inputs(
            self.config.vision,
            checked,
            self.layout,
            position_ids=position_ids,
            pixel_values=pixel_values,
            image_grid_thw=image_grid_thw,
            pixel_values_videos=pixel_values_videos,
            video_grid_thw=video_grid_thw,
            mm_token_type_ids=mm_token_type_ids,
            moe_mm_token_type_ids=moe_mm_token_type_ids,
            advance=self.config.vision.position_advance,
        )
        if inputs.vision is not None and cache is not None and position_ids is None and int(cache.index) > 0:
            raise ValueError(
                "images behind a filled cache: their positions depend on what came before; give position_ids [3, B, T]"
            )
        return self.run(inputs, cache, Collect(router_logits=True, hidden_states=output_hidden_states))

    def image_features(self, pixel_values: Any, image_grid_thw: Any) -> tuple[jax.Array, jax.Array]:
        """Features of images or videos, on one device.

        Args:
          pixel_values: [N, C], normalised patches in processor order.
          image_grid_thw: [images, 3] patches along time, height and width.

        Returns:
          (vision tower output [N, D], rows for the token stream [rows, H]).

        Raises:
          ValueError: a grid that does not cover the patches, or patches of another width.
        """
        vision, grid, pixels = self.vision_tower.config, np.asarray(image_grid_thw), np.asarray(pixel_values)
        patches, width = int(grid.prod(-1).sum()), vision.in_channels * vision.patch_size**2
        if pixels.shape != (patches, width):
            raise ValueError(f"image_grid_thw covers {patches} patches, pixel_values has {pixels.shape}, not [{patches}, {width}]")
        merge = vision.spatial_merge_size
        spread = spread_images(grid.tolist(), [0] * len(grid), num_groups=1, ranks=1, merge_size=merge)
        given = VisionInputs.of(spread, pixels)
        features = self.vision_tower(given.pixel_values[0], given.segment_ids[0], given.position_ids[0])
        order = np.argsort(np.where(spread.source >= 0, spread.source, patches).reshape(-1), kind="stable")[:patches]
        rows = self.resampler(features, given.pairs[0])[0]
        return features[0][order], rows[np.concatenate(spread.rows)]

    def vision_rows(self, vision: VisionInputs) -> jax.Array:
        """Token rows [S, M, k, H] of images and videos, each computed by the device it was given to."""
        parts = nnx.split((self.vision_tower, self.resampler))

        def on_device(weights: Any, items: VisionInputs) -> jax.Array:
            tower, resampler = nnx.merge(parts[0], weights)
            lead = items.segment_ids.shape[:2]
            flat = jax.tree.map(lambda a: a.reshape(lead[0] * lead[1], *a.shape[2:]), items)
            with jax.named_scope("vision_tower"):
                features = tower(flat.pixel_values, flat.segment_ids, flat.position_ids)
            with jax.named_scope("resampler"):
                rows = resampler(features, flat.pairs)
            return rows.reshape(*lead, *rows.shape[1:])

        rows: jax.Array = on_every_device(on_device, parts[1], vision, self.layout)
        return rows

    def features(self, inputs: TextInputs) -> jax.Array | None:
        """Token rows [S, M k, H] of the images and videos, each made where its image was put; None without."""
        if not isinstance(inputs, MultimodalInputs) or inputs.vision is None:
            return None
        rows = self.vision_rows(inputs.vision)
        groups = rows.shape[0] if inputs.grouped else 1
        rows = rows.reshape(groups, -1, rows.shape[-1]).astype(self.dtypes.compute)
        # From here on every device of the group has them all.
        return constrain(rows, "batch" if inputs.grouped else None, None, None)

    def embedded(self, inputs: TextInputs, features: jax.Array | None) -> jax.Array:
        """Token embeddings with rows of images and videos in their places, [B, T, H]."""
        x = super().embedded(inputs, None)
        if features is None:
            return x
        assert isinstance(inputs, MultimodalInputs) and inputs.feature_ids is not None
        groups = features.shape[0]
        # Whole rows, forward and backward: looking up among tokens that are split between shards, the partitioner fails in a stage.
        x = constrain_in_stage(x, "batch", "full_sequence", "activation_embed")
        batch, tokens, width = x.shape
        placed = place_features(
            x.reshape(groups, batch // groups, tokens, width), features, inputs.feature_ids.reshape(groups, batch // groups, tokens)
        )
        placed = constrain_in_stage(placed.reshape(batch, tokens, width), "batch", "full_sequence", "activation_embed")
        return constrain(placed, "batch", "sequence", "activation_embed")

    def _rope(self, position_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        if position_ids.ndim == 2:
            return super()._rope(position_ids)
        section = self.config.mrope_section
        assert section is not None
        return multimodal_rope_tables(position_ids, self.config.head_dim, self.config.rope_theta, section)
