"""What a training step will communicate, from shapes alone: by kind and axis, without compiling.

The model mirrors the operations that make collectives: blocks split over `tensor` (`layer_collectives`), the exchange of experts
(`exchange_collectives`), look-up, head and further tokens (`edge_collectives`), gradients and ZeRO (`weight_uses`,
`weight_collectives`), and here how often each of them runs: microbatches, what the backward pass runs again, ticks of a pipeline.
Scalars, statistics of routers and other things that no time is lost on are left out.
"""

from __future__ import annotations

from ernie_jax.config.run import RunConfig
from ernie_jax.plan.communication import Communication
from ernie_jax.plan.edge_collectives import further_tokens, head, look_up, look_up_backward, look_up_in_stage
from ernie_jax.plan.hlo import CollectiveUse
from ernie_jax.plan.layer_collectives import layer
from ernie_jax.plan.pipeline_shares import StageTicks, stage_ticks
from ernie_jax.plan.step_sizes import StepSizes, Times
from ernie_jax.plan.vision_collectives import vision_tower
from ernie_jax.plan.weight_collectives import compressed, stage_transfers, updated
from ernie_jax.train.gradients import counts_first


def predict_collectives(run: RunConfig, platform: str = "gpu", stage: int | None = None) -> list[CollectiveUse]:
    """What one device sends and receives in one optimiser step, most bytes first.

    Bytes and kinds mean what they mean of a compiled program (`program_collectives`): of a pipeline with `pipeline_shares` of the
    stage. Weights whose parts are gathered or whose gradients are summed count whole, as they travel.

    With fewer kv heads than tensor shards the backward pass of attention in tiles also sums gradients of keys and values between
    the shards of a head, tile by tile, as often as the documents have tiles; these sums are not counted.

    Args:
      run: a run whose mesh has all its sizes.
      platform: `cpu`, `gpu` or `tpu`. On `cpu` there are no collectives in bfloat16, and a sum of which each device keeps a part is
        an all-reduce; elsewhere it is a reduce-scatter.
      stage: of a pipeline; None for the one that communicates most.

    Raises:
      ValueError: an axis of -1, sizes that the mesh does not divide, a stage that is not there.
    """
    step = StepSizes.of(run)
    if step.stages == 1:
        if stage not in (None, 0):
            raise ValueError(f"stage {stage} of a mesh without pipeline stages; expected None or 0")
        return _whole(step, platform).uses()
    # Most stages do the same.
    stages = range(step.stages) if stage is None else (stage,)
    different = {stage_ticks(run, each) for each in stages}
    once = Communication(step.mesh, platform)
    stage_transfers(once, step)
    updated(once, step)
    return max((_stage(step, once.copy(), ticks) for ticks in different), key=lambda out: out.bytes).uses()


def _whole(step: StepSizes, platform: str) -> Communication:
    """Without a pipeline."""
    out, parts = Communication(step.mesh, platform), float(step.run.parts)
    passes = [Times(parts, parts)] + [Times(parts, 0.0)] * counts_first(step.run)
    apart = step.run.optimizer.gradient_compression != "none"
    for times in passes:
        if not apart or not times.backwards:
            look_up(out, step, times.forwards)
        for segment in range(len(step.segments)):
            _segment(out, step, segment, times)
    if apart:
        # Inside the data shards look-ups are as in a stage.
        look_up_in_stage(out, step, parts, parts)
        compressed(out, step)
    else:
        look_up_backward(out, step, parts)
    head(out, step, parts)
    vision_tower(out, step, Times(parts * len(passes), parts))
    further_tokens(out, step, parts, in_stage=apart)
    updated(out, step)
    return out


def _stage(step: StepSizes, out: Communication, ticks: StageTicks) -> Communication:
    """`out` with what one stage of a pipeline does in its ticks."""
    # With a tensor axis, what ZeRO 3 splits is brought together once, not where it is used.
    within = step.without_zero if step.tensor > 1 else step
    own, count, starts, ends = step.pipelined, float(ticks.counting_ticks > 0), float(ticks.starts), float(ticks.ends)
    forward_layers = ticks.forward_layers + (1 + count) * ticks.backward_layers
    _segment(out, within, own, Times(forward_layers, ticks.backward_layers), repeats=1)
    for segment in range(own):
        # In the forward tick, at the start of the backward, and for the gradient, where only its backward pass reads it: of a
        # single layer, what that runs again is enough.
        single, everything = step.segments[segment].repeats == 1, step.plan_of(step.segments[segment].unit).everything
        forwards = 2 if single and not everything else 3
        _segment(out, within, segment, Times((forwards + count) * starts, starts, starts if single and everything else 0.0))
    for segment in range(own + 1, len(step.segments)):
        _segment(out, within, segment, Times((1 + count) * ends, ends))
    look_up_in_stage(out, within, (3 + count) * starts, starts)
    head(out, within, ends)
    further_tokens(out, within, ends, in_stage=True)
    vision_tower(out, step, Times((1 + count) * step.run.parts, step.run.parts))
    sends = 2 * ticks.ticks + ticks.counting_ticks
    out.add("collective-permute", ("pipeline",), step.stream / step.tensor, step.dtype, sends, "pipeline_send")
    return out


def _segment(out: Communication, step: StepSizes, number: int, times: Times, repeats: int | None = None) -> None:
    """All layers of a segment, each as often as `times` says of a repetition, or of all repetitions where `repeats` is 1."""
    segment = step.segments[number]
    plan, count = step.plan_of(segment.unit), segment.repeats if repeats is None else repeats
    each = Times(times.forwards * count, times.backwards * count, times.unread * count)
    for place, kind in enumerate(segment.unit):
        own = step.weights_of(number, place)
        layer(out, step, kind, own, plan, each, inner=place + 1 < len(segment.unit))
