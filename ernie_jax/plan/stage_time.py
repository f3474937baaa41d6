"""How long a pipeline takes from what its stages have to do. S stages, v chunks a stage, K = S v of them, M microbatches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from ernie_jax.config.run import RunConfig
from ernie_jax.config.segments import segments_of
from ernie_jax.parallel.pipeline import Timetable, make_timetable, simulate
from ernie_jax.plan.pipeline_shares import stage_plan
from ernie_jax.train.stages import pipelined_segment

# Above so many pieces of work simulating them takes longer than the formula is wrong.
MOST_SIMULATED = 512


@dataclass(frozen=True)
class StageCosts:
    """Seconds of one microbatch by virtual stage, K of each in the order of the layers.

    Attributes:
      stages: S.
      forward, backward: of the virtual stages; the last one's forward is part of its backward, and 0.
      saved: the forward that is so spared.
    """

    stages: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    saved: float = 0.0

    @property
    def work(self) -> tuple[float, ...]:
        """[S] seconds that each stage works for a microbatch."""
        each = [f + b for f, b in zip(self.forward, self.backward, strict=True)]
        return tuple(sum(each[s :: self.stages]) for s in range(self.stages))


def layers_of_stages(run: RunConfig) -> tuple[list[dict[str, int]], dict[str, int], dict[str, int]]:
    """(layers by kind of each virtual stage's chunk, of the segments before the first, of those behind the last).

    Raises:
      ValueError: fewer repeats than virtual stages.
    """
    segments, spread, plan = segments_of(run.model), pipelined_segment(run.model), stage_plan(run)
    unit = segments[spread].unit
    chunks = [{kind: count * unit.count(kind) for kind in unit} for count in plan.counts]
    before: dict[str, int] = {}
    behind: dict[str, int] = {}
    for i, segment in enumerate(segments):
        if i != spread:
            edge = before if i < spread else behind
            for kind in segment.unit:
                edge[kind] = edge.get(kind, 0) + segment.repeats
    return chunks, before, behind


def pipeline_seconds(run: RunConfig, costs: StageCosts) -> float:
    """From the first forward to the last backward of a step: simulated where it has few pieces, else by the formula."""
    virtual = run.pipeline.virtual_stages
    if 2 * len(costs.forward) * run.parts <= MOST_SIMULATED:
        table = _timetable(run.pipeline.schedule, costs.stages, run.parts, virtual)
        return simulate(table, costs.forward, costs.backward).duration
    # The last stage of gpipe, which has no forward of its own, has nothing to do until all forwards are there.
    late = (run.parts - 1) * max(costs.forward) if run.pipeline.schedule == "gpipe" else 0.0
    return formula_seconds(costs.work, run.parts, virtual) + late


def formula_seconds(work: Sequence[float], microbatches: int, virtual_stages: int) -> float:
    """The fullest stage's work, and a chunk of every other stage to fill and drain the pipeline.

    With equal stages M w + (S - 1) w / v, as in `parallel.pipeline.schedules`; with unequal ones the fullest never waits but for
    the first and the last microbatch.
    """
    most = max(work)
    return microbatches * most + (sum(work) - most) / virtual_stages


@functools.lru_cache(maxsize=256)
def _timetable(schedule: str, stages: int, microbatches: int, virtual_stages: int) -> Timetable:
    return make_timetable(schedule, stages=stages, microbatches=microbatches, virtual_stages=virtual_stages)
