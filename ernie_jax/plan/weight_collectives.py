"""What weights cost once a step: bringing those of a pipeline's stage together, taking gradients back, updating.

R layers of a stack, v chunks of C places a stage, D model. Between steps the stages split D of every matrix among them.
"""

from __future__ import annotations

from ernie_jax.parallel.compressed import make_compression
from ernie_jax.plan.communication import Communication
from ernie_jax.plan.model_weights import ModelWeight
from ernie_jax.plan.pipeline_shares import stage_plan
from ernie_jax.plan.step_sizes import StepSizes
from ernie_jax.train.state import LEAST_COMPRESSED

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
        weight, held, back = each.weight, each.used / each.gathered, each.used / each.moments
        staged = weight.path.startswith(prefix)
        # 16-bit weights travel as integers, which XLA:CPU sends as they are.
        narrow = step.dtype == "bf16" and weight.cast
        dtype = "u16" if narrow else "f32"
        if is_vision(weight):
            continue
        if step.tensor > 1 and each.gathered_over:
            # What ZeRO 3 splits is whole in a stage where there is a tensor axis, and from one split to the other the partitioner
            # knows no way but through the whole of all stages.
            out.gather((*STAGES, *each.gathered_over), each.used * weight.layers, dtype, 1, "stage_weights")
        elif weight.is_matrix and not staged:
            out.gather(STAGES, held * weight.layers, dtype, 1, "stage_weights")
        elif weight.is_matrix:
            out.add("all-to-all", STAGES, held * places, dtype, 1, "stage_weights")
        if not staged:
            out.sum(STAGES, back * weight.layers, "f32", 1, "stage_gradients")
        elif weight.is_matrix:
            out.add("all-to-all", STAGES, back * places, "f32", 1, "stage_gradients")
        else:
            out.gather(STAGES, weight.size * places * step.stages, "f32", 1, "stage_gradients")


def compressed(out: Communication, step: StepSizes) -> None:
    """Adds the sums of gradients over the data axis, once a step and each device's part of a gradient on its own.

    They are sent to those that add them, and the sums to all.
    """
    config = step.run.optimizer
    if config.gradient_compression == "none":
        return
    compression, devices = make_compression(config.gradient_compression, config.gradient_fraction), step.mesh["data"]
    for each in step.weights:
        size = round(each.used * each.weight.layers)
        if size < LEAST_COMPRESSED:
            out.sum(("data",), size, "f32", 1, "compressed_sum")
        else:
            terms, sums = compression.bytes(size, devices)
            out.add("all-to-all", ("data",), terms, "u8", 1, "compressed_sum")
            out.gather(("data",), sums, "u8", 1, "compressed_sum")


def is_vision(weight: ModelWeight) -> bool:
    """Whether it belongs to the vision tower or the resampler, which are in no stage."""
    return weight.path.startswith(("vision_tower/", "resampler/"))
