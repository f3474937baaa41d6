"""When each stage runs what: the table that a pipeline executes and that a simulator reads.

S stages, v virtual stages a stage, K = S v virtual stages of which number k lives on stage k mod S, M microbatches.

A schedule is two arrays of ticks, `forward[k, m]` and `backward[k, m]`. In one tick a stage runs at most one forward and then at
most one backward; what it makes is with its neighbour in the next tick. The backward makes the activations of its chunk again
from the input, which waits in a slot until then. From the two arrays this module derives which slot holds what and when, so a
new schedule is two arrays and no new code.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

IDLE = -1


@dataclass(frozen=True)
class Timetable:
    """A schedule worked out for every tick and stage.

    Attributes:
      forward_tick, backward_tick: [K, M]; the forward of the last virtual stage is the beginning of its backward, so it is not
        run on its own. `backward_tick` is None for a pass that goes forward only.
      stages, microbatches: S and M.
    """

    forward_tick: np.ndarray
    backward_tick: np.ndarray | None
    stages: int
    microbatches: int

    def __post_init__(self) -> None:
        forward, backward, stages = self.forward_tick, self.backward_tick, self.stages
        virtual = len(forward)
        ordered = bool((np.diff(forward, axis=0) > 0).all())
        if backward is not None:
            ordered &= bool((np.diff(backward, axis=0) < 0).all()) and bool((backward[-1] >= forward[-1]).all())
        alone = all(
            len(np.unique(ticks[s::stages])) == ticks[s::stages].size
            for ticks in (forward, backward)
            if ticks is not None
            for s in range(stages)
        )
        if virtual % stages or not ordered or not alone:
            raise ValueError(
                f"a timetable of {virtual} virtual stages on {stages} stages; expected a multiple of the stages, each forward "
                "after the one it takes its input from, each backward after the one it takes its cotangent from, one of each a tick"
            )

    @property
    def virtual_stages(self) -> int:
        """v, chunks of layers of one stage."""
        return len(self.forward_tick) // self.stages

    @property
    def ticks(self) -> int:
        """Number of ticks from the first to the last action."""
        last = self.forward_tick if self.backward_tick is None else self.backward_tick
        return int(last.max()) + 1

    @property
    def rows(self) -> TickRows:
        """The table that a stage reads, tick by tick."""
        return _rows(self)


@dataclass(frozen=True)
class TickRows:
    """For each tick and stage, [ticks, S] int32; -1 where there is nothing.

    Attributes:
      forward, forward_chunk: microbatch and chunk to run forward.
      forward_slot: where its input waits, -1 for the first virtual stage, which starts from tokens.
      backward, backward_chunk, backward_slot: the same of the backward.
      cotangent_slot: where the cotangent of its output waits, -1 for the last virtual stage, which starts from the loss.
      arrival_slot, cotangent_arrival_slot: where to put what arrives at the end of the tick; one past the last slot for nothing.
      slots, cotangent_slots: how many there are.
    """

    forward: np.ndarray
    forward_chunk: np.ndarray
    forward_slot: np.ndarray
    backward: np.ndarray
    backward_chunk: np.ndarray
    backward_slot: np.ndarray
    cotangent_slot: np.ndarray
    arrival_slot: np.ndarray
    cotangent_arrival_slot: np.ndarray
    slots: int
    cotangent_slots: int

    def columns(self) -> dict[str, np.ndarray]:
        """The arrays by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}


def assign_slots(intervals: dict[tuple[int, int], tuple[int, int]]) -> tuple[dict[tuple[int, int], int], int]:
    """The lowest free slot for each interval of ticks (both ends included), and how many slots are used.

    Taking intervals by their begin needs as many slots as ever overlap, which is the least possible.
    """
    ends: list[int] = []
    found: dict[tuple[int, int], int] = {}
    for key, (begin, end) in sorted(intervals.items(), key=lambda item: item[1]):
        slot = next((i for i, busy_until in enumerate(ends) if busy_until < begin), len(ends))
        if slot == len(ends):
            ends.append(end)
        ends[slot] = end
        found[key] = slot
    return found, len(ends)


def _rows(table: Timetable) -> TickRows:
    stages, virtual, count = table.stages, len(table.forward_tick), table.microbatches
    forward, backward = table.forward_tick, table.backward_tick
    names = [name for name in TickRows.__annotations__ if name not in ("slots", "cotangent_slots")]
    rows = {name: np.full((table.ticks, stages), IDLE, np.int32) for name in names}
    inputs: list[dict[tuple[int, int], tuple[int, int]]] = [{} for _ in range(stages)]
    cotangents: list[dict[tuple[int, int], tuple[int, int]]] = [{} for _ in range(stages)]
    for k in range(virtual):
        for m in range(count):
            if k:
                last_use = forward[k, m] if backward is None else backward[k, m]
                inputs[k % stages][k, m] = (int(forward[k - 1, m]) + 1, int(last_use))
            if backward is not None and k < virtual - 1:
                cotangents[k % stages][k, m] = (int(backward[k + 1, m]) + 1, int(backward[k, m]))
    slots, cotangent_slots = [assign_slots(i) for i in inputs], [assign_slots(i) for i in cotangents]
    for k in range(virtual):
        s, chunk = k % stages, k // stages
        for m in range(count):
            slot = slots[s][0].get((k, m), IDLE)
            if backward is None or k < virtual - 1:
                tick = forward[k, m]
                rows["forward"][tick, s], rows["forward_chunk"][tick, s], rows["forward_slot"][tick, s] = m, chunk, slot
            if k:
                rows["arrival_slot"][forward[k - 1, m], s] = slot
            if backward is None:
                continue
            tick = backward[k, m]
            rows["backward"][tick, s], rows["backward_chunk"][tick, s], rows["backward_slot"][tick, s] = m, chunk, slot
            if k < virtual - 1:
                cotangent = cotangent_slots[s][0][k, m]
                rows["cotangent_slot"][tick, s] = cotangent
                rows["cotangent_arrival_slot"][backward[k + 1, m], s] = cotangent
    most, most_cotangents = max(n for _, n in slots), max(n for _, n in cotangent_slots)
    for name, nowhere in (("arrival_slot", most), ("cotangent_arrival_slot", most_cotangents)):
        rows[name] = np.where(rows[name] == IDLE, nowhere, rows[name])
    return TickRows(**rows, slots=most, cotangent_slots=most_cotangents)
