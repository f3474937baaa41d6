"""A batch without its values, to compile for. B rows, T tokens, S groups of rows, M devices of a group, n patches of a device."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ernie_jax.config.run import RunConfig
from ernie_jax.models import batch_shardings
from ernie_jax.sharding import BATCH_AXES, MODEL_AXES, Layout


def abstract_batch(run: RunConfig, layout: Layout) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of every batch of a run as ShapeDtypeStructs with their shardings.

    Raises:
      ValueError: a vision-language model whose batches differ in shape, for want of `config.data.max_patches`.
    """
    config, tokens = run.model, (run.batch_size, run.seq_len)
    shapes: dict[str, tuple[int, ...]] = {}
    if config.vision is not None:
        vision, patches = config.vision, run.data.max_patches
        if patches is None:
            raise ValueError(
                "config.data.max_patches is not set, so the step has another shape for every size of batch; set it, that one step "
                "can be compiled (config.remat='auto' needs that)"
            )
        # Microbatches of a batch shard are groups of their own.
        spread = (layout.axis_size(*BATCH_AXES) * run.parts, layout.axis_size(*MODEL_AXES))
        shapes = {
            "position_ids": (*tokens, 3),
            "pixel_values": (*spread, patches, vision.in_channels * vision.patch_size**2),
            "patch_segment_ids": (*spread, patches),
            "patch_position_ids": (*spread, patches, 2),
            "patch_pairs": (*spread, patches // vision.spatial_merge_size**2, 2),
        }
    return {
        key: jax.ShapeDtypeStruct(shapes.get(key, tokens), jnp.float32 if key == "pixel_values" else jnp.int32, sharding=sharding)
        for key, sharding in batch_shardings(layout, multimodal=config.vision is not None).items()
    }
