"""What weights cost once a step: bringing those of a pipeline's stage together, taking gradients back, updating.

R layers of a stack, v chunks of C places a stage, D model. Between steps the stages split D of every matrix among them.
"""

from __future__ import annotations

from ernie_jax.plan.communication import Communication
from ernie_jax.plan.pipeline_shares import stage_plan
from ernie_jax.plan.step_sizes import StepSizes

STAGES = ("pipeline",)


def updated(out: Communication, step: StepSizes) -> None:
    """Adds what brings new weights to where they are used: with ZeRO 1 each device has updated those of its moments."""
    if step.run.mesh.zero != 1:
        return
    for each in step.weights:
        if not each.moments_over:
            continue
        elements = each.used * each.weight.layers / step.stages
        out.gather(each.moments_over, elements, "f32", 1, "update")
        if step.stages > 1:
            # D is split over the batch axes first and over stages within them: parts change places before they are gathered.
            out.add("collective-permute", (*STAGES, *each.moments_over), elements / each.moments, "f32", 1, "update")


def stage_transfers(out: Communication, step: StepSizes) -> None:
    """Adds what stages exchange once a step: their layers' weights there, gradients back; the ends of the pipeline are on all."""
    prefix = f"decoder/segments/{step.pipelined}/"
    plan = stage_plan(step.run)
    places = plan.virtual_stages * plan.places
    for each in step.weights:
        weight, held = each.weight, each.used / each.gathered
        if step.tensor > 1 and each.gathered_over:
            # With a tensor axis, what ZeRO 3 splits is brought together here, not where it is used.
            held = each.used
            copies, dtype = (places, step.dtype) if weight.path.startswith(prefix) else (weight.layers, "f32")
            out.gather(each.gathered_over, held * copies, dtype, 1, "stage_weights")
        if not weight.path.startswith(prefix):
            if weight.is_matrix:
                out.gather(STAGES, held * weight.layers, "f32", 1, "stage_weights")
            out.sum(STAGES, each.used / each.moments * weight.layers, "f32", 1, "stage_gradients")
        elif weight.is_matrix:
            out.add("all-to-all", STAGES, held * places, step.dtype, 1, "stage_weights")
            out.add("all-to-all", STAGES, each.used / each.moments * places, "f32", 1, "stage_gradients")
        else:
            out.gather(STAGES, weight.size * places * step.stages, "f32", 1, "stage_gradients")
