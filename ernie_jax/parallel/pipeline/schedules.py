"""Pipeline schedules by name. S stages, v virtual stages a stage, M microbatches.

  gpipe        all forwards, then all backwards; M inputs wait at a stage.
  1f1b         a forward and a backward a tick; at most 2 S - 1 inputs wait at a stage, whatever M is.
  interleaved  1f1b over v chunks a stage: the bubble is v times smaller, v times as much is sent.

With a backward b times as long as a forward, all of them take (v M + S - 1)(1 + b) / v forward times of a stage for v M (1 + b) / v
of work, so the bubble is (S - 1) / (v M + S - 1); `gpipe` and `1f1b` have v = 1.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ernie_jax.parallel.pipeline.timetable import Timetable

# (stages, virtual stages, microbatches) -> (forward ticks, backward ticks), each [S v, M].
Schedule = Callable[[int, int, int], tuple[np.ndarray, np.ndarray]]


def _gpipe(stages: int, virtual: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    s, m = np.arange(stages)[:, None], np.arange(count)
    return s + m, (count + stages - 2) + (stages - 1 - s) + m


def _interleaved(stages: int, virtual: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Groups of S microbatches pass chunk after chunk; with v = 1 this is `1f1b`."""
    k, m = np.arange(stages * virtual)[:, None], np.arange(count)
    stage, chunk, group, place = k % stages, k // stages, m // stages, m % stages
    forward = stage + (group * virtual + chunk) * stages + place
    # The last virtual stage runs a microbatch backward in the tick in which it would run it forward.
    first = virtual * stages - 1
    return forward, first + (stages - 1 - stage) + (group * virtual + virtual - 1 - chunk) * stages + place


SCHEDULES: dict[str, Schedule] = {"gpipe": _gpipe, "1f1b": _interleaved, "interleaved": _interleaved}


def make_timetable(schedule: str, *, stages: int, microbatches: int, virtual_stages: int = 1) -> Timetable:
    """The timetable of a schedule.

    Args:
      schedule: a name of `SCHEDULES`.
      stages: S, at least 2.
      microbatches: M, at least 1; `interleaved` works in groups of S of them, of which the last may be short.
      virtual_stages: v, chunks of layers of a stage; more than 1 for `interleaved`, 1 for the others.

    Raises:
      ValueError: an unknown name, numbers out of range.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown pipeline schedule {schedule!r}; expected one of {tuple(SCHEDULES)}")
    if stages < 2 or microbatches < 1 or virtual_stages < 1:
        raise ValueError(
            f"a pipeline of {stages} stages, {virtual_stages} virtual stages and {microbatches} microbatches; expected at least 2, "
            "1 and 1"
        )
    if schedule != "interleaved" and virtual_stages != 1:
        raise ValueError(f"pipeline schedule {schedule!r} with virtual_stages={virtual_stages}; only 'interleaved' has more than 1")
    return Timetable(*SCHEDULES[schedule](stages, virtual_stages, microbatches), stages, microbatches)


def forward_timetable(*, stages: int, microbatches: int, virtual_stages: int = 1) -> Timetable:
    """The forward half of `interleaved`, for passes without gradients: evaluation, counting of choices."""
    forward, _ = _interleaved(stages, virtual_stages, microbatches)
    return Timetable(forward, None, stages, microbatches)
