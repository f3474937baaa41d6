"""What a schedule costs before anything is compiled: ticks, bubble, waiting inputs, and who works when.

S stages, K virtual stages, M microbatches. A stage does what its timetable lists, in that order, as soon as what it needs from
its neighbours is there; sending takes no time. That is how devices run it: nothing makes them wait for the end of a tick.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ernie_jax.parallel.pipeline.timetable import IDLE, TickRows, Timetable


@dataclass(frozen=True)
class Span:
    """One piece of work: on which stage, of which chunk and microbatch, forward or backward, from when to when."""

    stage: int
    chunk: int
    microbatch: int
    backward: bool
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """What a timetable comes to.

    Attributes:
      spans: all work, in order of time within a stage.
      duration: from the first begin to the last end, in the unit of the costs.
      busy: [S] time each stage works.
      ticks: ticks of the loop.
      active: [S, 2] forwards and backwards that each stage runs; the forward of the last virtual stage is part of its backward.
      waiting: [S] most inputs of chunks that a stage keeps at once, the slots that the loop has for them.
    """

    spans: tuple[Span, ...]
    duration: float
    busy: np.ndarray
    ticks: int
    active: np.ndarray
    waiting: np.ndarray

    @property
    def bubble(self) -> float:
        """Share of the stages' time in which they wait."""
        return float(1 - self.busy.sum() / (len(self.busy) * self.duration))


def simulate(
    timetable: Timetable, forward_cost: float | Sequence[float] = 1.0, backward_cost: float | Sequence[float] = 2.0
) -> Simulation:
    """Runs a timetable on stages that never wait for longer than they must.

    Args:
      timetable: the schedule.
      forward_cost, backward_cost: of one chunk, for all virtual stages or for each [K]. A stage makes activations again in its
        backward, so a forward of 1 has a backward of 3; the last virtual stage has no forward of its own (0, 3, and the head).
    """
    forward, backward, stages = timetable.forward_tick, timetable.backward_tick, timetable.stages
    virtual, count = forward.shape
    costs = [np.broadcast_to(np.asarray(cost, float), (virtual,)) for cost in (forward_cost, backward_cost)]
    # Within a stage by tick, in a tick the forward first; between stages whatever a piece needs has an earlier place.
    work = [(int(forward[k, m]), 0, k, m) for k in range(virtual) for m in range(count)]
    if backward is not None:
        work += [(int(backward[k, m]), 1, k, m) for k in range(virtual) for m in range(count)]
    free, busy = np.zeros(stages), np.zeros(stages)
    ends: dict[tuple[int, int, int], float] = {}
    spans = []
    # In a tick the last virtual stage goes backward what it got that tick, so a forward stands before all backwards.
    for _, back, k, m in sorted(work):
        needed = [(0, k, m), (1, k + 1, m)] if back else [(0, k - 1, m)]
        stage = k % stages
        start = max([free[stage], *(ends[key] for key in needed if key in ends)])
        end = start + costs[back][k]
        free[stage], ends[back, k, m] = end, end
        busy[stage] += end - start
        spans.append(Span(stage, k // stages, m, bool(back), float(start), float(end)))
    rows = timetable.rows
    active = np.stack([(rows.forward != IDLE).sum(0), (rows.backward != IDLE).sum(0)], axis=1)
    return Simulation(tuple(spans), float(free.max()), busy, timetable.ticks, active, _waiting(rows))


def _waiting(rows: TickRows) -> np.ndarray:
    return np.array([len(set(slots.tolist()) - {rows.slots}) for slots in rows.arrival_slot.T])
