"""The memory of a vision tower, and of the rows of features it gives, in bytes of one device.

p patches of a device and microbatch, V width of the tower, I of its MLPs, L blocks, m merge size, D model width of the language
model.
"""

from __future__ import annotations

from collections import Counter

from ernie_jax.config.remat import remat_plan, remat_within
from ernie_jax.config.run import RunConfig
from ernie_jax.plan.activation_memory import FLOAT, Bytes, LayerSizes, parts
from ernie_jax.sharding import MODEL_AXES, Layout
from ernie_jax.train.remat_prediction import tag_bytes


def tower_kept(run: RunConfig, sizes: LayerSizes) -> Bytes:
    """What all blocks keep for their backward pass, of one microbatch."""
    vision = run.model.vision
    if vision is None:
        return Counter()
    plan = remat_plan(remat_within(run.compute.remat, ("vision_block",)))
    rows, wide = sizes.shape.patches * vision.hidden_size, sizes.wide
    if plan.everything:
        # Norms: the input, twice it centred, the normed rows in float32, scaled rows; q, k and v cut and turned, the output twice.
        block: float = 2 * rows * (3 * FLOAT + wide) + (3 + 2 + 2) * rows * wide
        # The MLP's first product, the activation's derivative and result.
        block += 3 * sizes.shape.patches * vision.intermediate_size * wide
    else:
        tags = tag_bytes(run.model, sizes.shape)
        block = (rows * sizes.shape.width + sum(tags.get(("vision", tag), 0) for tag in plan.saved)) * wide / sizes.shape.width
    return parts(activations=vision.depth * block)


def tower_backward(run: RunConfig, sizes: LayerSizes) -> Bytes:
    """While the backward pass of a block runs: its stream, attention and their gradients; its MLP's products and theirs."""
    vision = run.model.vision
    if vision is None:
        return Counter()
    patches = sizes.shape.patches
    return parts(workspace=patches * (16 * vision.hidden_size + 4 * vision.intermediate_size) * sizes.wide)


def feature_bytes(run: RunConfig, sizes: LayerSizes, layout: Layout, microbatches: int) -> Bytes:
    """Rows of features of a batch shard, which all devices behind it have whole, and their gradients."""
    vision = run.model.vision
    if vision is None:
        return Counter()
    rows = sizes.shape.patches // vision.spatial_merge_size**2 * layout.axis_size(*MODEL_AXES)
    return parts(activations=2 * microbatches * rows * run.model.hidden_size * sizes.shape.width)
