"""How often the stages of a pipeline do what a tick may hold: of a step's program, which branches are taken how often."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ernie_jax.config.run import RunConfig
from ernie_jax.config.segments import segments_of
from ernie_jax.parallel.pipeline import StagePlan, forward_timetable, make_timetable
from ernie_jax.train.gradients import counts_first
from ernie_jax.train.stages import pipelined_segment


@dataclass(frozen=True)
class StageTicks:
    """What one stage does in a step of `ticks` ticks.

    Attributes:
      ticks: of the pass with gradients, in each of which activations and cotangents are sent on.
      counting_ticks: of the pass before it that counts choices, 0 without.
      forwards, backwards: chunks of layers run forward and backward. The last virtual stage runs nothing forward alone.
      starts: of the forwards, and as many of the backwards, that begin with the tokens.
      ends: of the backwards that begin with the loss.
      places: rounds of the loop over a chunk's layers, those of the fullest chunk.
      forward_layers, backward_layers: layers of the repeating unit run in all forwards, and in all backwards.
      even: whether all chunks have the same layers.
    """

    ticks: int
    counting_ticks: int
    forwards: int
    backwards: int
    starts: int
    ends: int
    places: int
    forward_layers: int
    backward_layers: int
    even: bool


def stage_plan(run: RunConfig) -> StagePlan:
    """The repeats of the pipelined segment by stage."""
    repeats = segments_of(run.model)[pipelined_segment(run.model)].repeats
    return StagePlan.spread(repeats, run.mesh.pipeline, run.pipeline.virtual_stages)


def stage_ticks(run: RunConfig, stage: int) -> StageTicks:
    """What a stage does in a step.

    Raises:
      ValueError: no such stage; fewer layers than virtual stages.
    """
    stages, virtual, count = run.mesh.pipeline, run.pipeline.virtual_stages, run.parts
    if not 0 <= stage < stages:
        raise ValueError(f"stage {stage} of a pipeline of {stages} stages; expected 0 to {stages - 1}")
    plan = stage_plan(run)
    chunks = [int(n) for n in plan.counts_by_stage[stage]]
    last = stage == stages - 1
    # The forward of the last virtual stage is the beginning of its backward.
    forward = chunks[:-1] if last else chunks
    ticks, counting = _ticks(run.pipeline.schedule, stages, count, virtual)
    return StageTicks(
        ticks=ticks,
        counting_ticks=counting if counts_first(run) else 0,
        forwards=len(forward) * count,
        backwards=len(chunks) * count,
        starts=count if stage == 0 else 0,
        ends=count if last else 0,
        places=plan.places,
        forward_layers=sum(forward) * count,
        backward_layers=sum(chunks) * count,
        even=len(set(plan.counts)) == 1,
    )


def pipeline_shares(run: RunConfig, stage: int) -> dict[str, float]:
    """Named scope -> share of the rounds in which its branch is taken in one stage, as `program_collectives` takes them.

    Empty without pipeline stages. The branch around each layer of unequal chunks is one of them: it skips the places of a chunk
    that has fewer layers than the fullest.

    Raises:
      ValueError: no such stage; fewer layers than virtual stages.
    """
    if run.mesh.pipeline == 1:
        return {}
    t = stage_ticks(run, stage)
    shares = {
        "stage_forward": t.forwards / t.ticks,
        "stage_backward": t.backwards / t.ticks,
        "embed": t.starts / t.backwards,
        "head_and_loss": t.ends / t.backwards,
    }
    if t.counting_ticks:
        # There the last virtual stage runs forward too.
        shares["count_choices/stage_forward"] = t.backwards / t.counting_ticks
    if not t.even:
        shares["stage_forward/attention"] = t.forward_layers / max(1, t.forwards * t.places)
        shares["stage_backward/attention"] = t.backward_layers / (t.backwards * t.places)
        shares["count_choices/stage_forward/attention"] = shares["stage_backward/attention"]
    return shares


@functools.lru_cache(maxsize=256)
def _ticks(schedule: str, stages: int, count: int, virtual: int) -> tuple[int, int]:
    table = make_timetable(schedule, stages=stages, microbatches=count, virtual_stages=virtual)
    return table.ticks, forward_timetable(stages=stages, microbatches=count, virtual_stages=virtual).ticks
