"""What the images of a vision-language model cost: weights of the tower on every device, features to those who share a batch.

M devices behind a batch shard, k feature rows of each, H model width.
"""

from __future__ import annotations

import math

from ernie_jax.plan.communication import TENSOR, Communication
from ernie_jax.plan.step_sizes import StepSizes, Times
from ernie_jax.plan.weight_collectives import is_vision
from ernie_jax.sharding import MESH_AXES, MODEL_AXES


def vision_tower(out: Communication, step: StepSizes, times: Times) -> None:
    """Adds passes of the tower over the images of a microbatch.

    Every device works on images of its own, with whole weights; their gradient is a sum over all devices.
    """
    model, patches = step.run.model, step.run.data.max_patches
    if model.vision is None or patches is None:
        return
    for each in step.weights:
        if is_vision(each.weight):
            elements = each.weight.size * each.weight.layers
            stages = ("pipeline",) if "embed" in each.weight.axes else ()
            out.gather((*stages, *each.gathered_over), elements, "f32", times.forwards, "vision_tower")
            out.sum(MESH_AXES, elements, "f32", times.backwards, "transpose/vision_tower")
    devices = math.prod(step.mesh[axis] for axis in MODEL_AXES)
    features = devices * patches // model.vision.spatial_merge_size**2 * model.hidden_size
    out.gather(MODEL_AXES, features, step.dtype, times.forwards, "vision_rows")
    if step.stages > 1:
        # The first stage alone has the cotangents, of all microbatches once they are through.
        out.sum(("pipeline",), features * times.backwards, step.dtype, 1, "transpose/vision_rows")
    else:
        # A feature row takes its cotangent from the token that it went to, which is looked up in whole rows.
        out.gather(TENSOR, step.stream, step.dtype, times.backwards, "transpose/vision_rows")
