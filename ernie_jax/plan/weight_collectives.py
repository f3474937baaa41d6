"""What weights cost once a step: bringing those of a pipeline's stage together, taking gradients back, updating.

R layers of a stack, v chunks of C places a stage, D model. Between steps the stages split D of every matrix among them.
"""

from __future__ import annotations

from collections.abc import Iterable

from ernie_jax.plan.communication import Communication
from ernie_jax.plan.model_weights import ModelWeight
from ernie_jax.plan.pipeline_shares import stage_plan
from ernie_jax.plan.step_sizes import StepSizes
from ernie_jax.train.stages import pipelined_segment

STAGES = ("pipeline",)


def updated(out: Communication, step: StepSizes) -> None:
    """Adds what brings new weights to where they are used: with ZeRO 1 each device has updated those of its moments."""
    if step.run.mesh.zero != 1:
        return
    for weight in step.weights:
        over = step.moments_over(weight)
        elements = step.whole(weight) * weight.layers / (step.stages if weight.is_matrix else 1)
        out.gather(over, elements, "f32", 1, "update")
        if weight.is_matrix and step.stages > 1:
            # D is split over the batch axes first and over stages within them: parts change places before they are gathered.
            crossing = tuple(axis for axis in over if step.mesh[axis] > 1)
            out.add(
                "collective-permute",
                (*STAGES, *crossing),
                step.part(weight, over) * weight.layers / step.stages,
                "f32",
                1 if crossing else 0,
                "update",
            )


def stage_transfers(out: Communication, step: StepSizes) -> None:
    """Adds what stages exchange once a step: their layers' weights there, gradients back; the ends of the pipeline are on all."""
    prefix = f"decoder/segments/{pipelined_segment(step.run)}/"
    plan = stage_plan(step.run)
    places = plan.virtual_stages * plan.places
    with_tensor = step.tensor > 1
    for weight in step.weights:
        zero = () if with_tensor else step.gathered_over(weight)
        # Within a stage: whole, with ZeRO 3 and no tensor axis as the batch axes split it.
        held, sums = step.part(weight, zero), step.part(weight, step.moments_over(weight))
        if weight.path.startswith(prefix):
            if not weight.is_matrix:
                out.gather(STAGES, weight.size * places * step.stages, "f32", 1, "stage_gradients")
                continue
            if with_tensor and (over := step.gathered_over(weight)):
                out.gather(over, step.whole(weight) * places, step.dtype, 1, "stage_weights")
            out.add("all-to-all", STAGES, held * places, step.dtype, 1, "stage_weights")
            out.add("all-to-all", STAGES, sums * places, "f32", 1, "stage_gradients")
        else:
            elements = weight.layers * held
            if weight.is_matrix:
                if with_tensor and (over := step.gathered_over(weight)):
                    out.gather(over, step.whole(weight) * weight.layers, "f32", 1, "stage_weights")
                out.gather(STAGES, elements, "f32", 1, "stage_weights")
            out.sum(STAGES, weight.layers * sums, "f32", 1, "stage_gradients")


def of_layers(weights: Iterable[ModelWeight], segment: int, place: int) -> list[ModelWeight]:
    """Those of one place of a segment's unit."""
    return [weight for weight in weights if weight.place == (segment, place)]
