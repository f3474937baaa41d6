"""Periodic work of a run: log, evaluate, checkpoint, profile, sample. The loop calls each hook; a hook knows when it is due."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from tensorboardX import SummaryWriter

from ernie_jax.train.flops import ModelCost, Peak
from ernie_jax.train.records import Record, Throughput, mfu
from ernie_jax.train.state import TrainState


@dataclass
class Moment:
    """A step boundary.

    Attributes:
      step: steps done.
      state: the state there; the next step consumes it. A hook may put one that computes the same in its place.
      batches: the data iterator, positioned behind the last batch used.
      final: whether this is the run's last step.
      stopping: whether the run ends here because it was asked to.
      notes: what hooks found out; becomes part of the step's record.
    """

    step: int
    state: TrainState
    batches: Iterator[Any]
    final: bool = False
    stopping: bool = False
    notes: Record = field(default_factory=dict)


class Hook:
    """Does nothing; subclasses override what they need.

    Attributes:
      every: due each so many steps, 0 for none of them.
      at_end: also due at the last step.
      at_stop: also due where the run is asked to stop.
      blocking: waits for the devices, so its time is not counted as training time.
    """

    every: int = 0
    at_end: bool = False
    at_stop: bool = False
    blocking: bool = False

    def due(self, moment: Moment) -> bool:
        """Whether `at_step` is wanted at this boundary."""
        periodic = self.every > 0 and moment.step % self.every == 0
        return periodic or (self.at_end and moment.final) or (self.at_stop and moment.stopping)

    def at_step(self, moment: Moment) -> None:
        """At a boundary where the hook is due, before the next step begins."""

    def at_record(self, record: Record, final: bool) -> None:
        """For every step, once its numbers have arrived on the host."""

    def close(self) -> None:
        """The run is over, well or not."""


class LogHook(Hook):
    """Completes each due record with speed, appends it to `metrics.jsonl` and TensorBoard, and hands it to `show`.

    Steps that something was noted at (an evaluation) and the last one are logged too.
    """

    def __init__(
        self,
        folder: Path,
        every: int,
        throughput: Throughput,
        cost: ModelCost,
        peak: Peak,
        show: Callable[[Record], None],
        *,
        tensorboard: bool = True,
    ) -> None:
        self.every = every
        self._throughput, self._cost, self._peak, self._show = throughput, cost, peak, show
        # Since the last record written: what is shown is a mean over the steps between.
        self._tokens = self._flops = 0.0
        writes = jax.process_index() == 0
        self._file = (folder / "metrics.jsonl").open("a") if writes else None
        self._board = SummaryWriter(str(folder / "tensorboard")) if writes and tensorboard else None

    def at_record(self, record: Record, final: bool) -> None:
        """Write the record when it is due."""
        self._tokens += record["tokens"]
        self._flops += self._cost.step(record)
        noted = any(key in record for key in ("eval_loss", "sample", "placement"))
        if not (final or noted or (self.every and record["step"] % self.every == 0)):
            return
        speed = self._throughput.mark()
        record["tokens_per_s"] = speed
        record["mfu"] = mfu(speed, self._flops / max(self._tokens, 1.0), self._peak)
        self._tokens = self._flops = 0.0
        record["peak_flops"] = self._peak.flops
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        if self._board is not None:
            self._scalars(record)
        self._show(record)

    def _scalars(self, record: Record) -> None:
        assert self._board is not None
        scalars = {f"train/{key}": value for key, value in record.items() if isinstance(value, (int, float)) and key != "step"}
        for name, layers in record["router"].items():
            if name not in ("load", "device_load"):
                scalars |= {f"router/{name}/layer_{i}": value for i, value in enumerate(layers)}
        for name, value in scalars.items():
            if value is not None:
                self._board.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Close the files."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


class EvalHook(Hook):
    """Held-out losses: `evaluate(state)` gives nats a token by name (`eval_loss` and its parts), which are noted."""

    blocking = True
    at_end = True

    def __init__(self, every: int, evaluate: Callable[[TrainState], Record]) -> None:
        self.every, self._evaluate = every, evaluate

    def at_step(self, moment: Moment) -> None:
        """Evaluate."""
        moment.notes.update(self._evaluate(moment.state))


class CheckpointHook(Hook):
    """`save(moment)` each so many steps, at the end, and at a stop that was asked for; `check()` raises what failed since."""

    at_end = True
    at_stop = True

    def __init__(self, every: int, save: Callable[[Moment], None], check: Callable[[], None]) -> None:
        self.every, self._save, self._check = every, save, check

    def at_step(self, moment: Moment) -> None:
        """Save."""
        self._save(moment)

    def at_record(self, record: Record, final: bool) -> None:
        """A save that failed in the background ends the run within a step."""
        self._check()


class SampleHook(Hook):
    """`sample(state)` gives a text, noted as `sample`."""

    blocking = True
    at_end = True

    def __init__(self, every: int, sample: Callable[[TrainState], str]) -> None:
        self.every, self._sample = every, sample

    def at_step(self, moment: Moment) -> None:
        """Sample."""
        moment.notes["sample"] = self._sample(moment.state)


class ProfileHook(Hook):
    """A `jax.profiler` trace of `count` steps beginning after step `start`, for TensorBoard or Perfetto."""

    every = 1

    def __init__(self, folder: Path, start: int, count: int) -> None:
        self._folder, self._start, self._stop = folder, start, start + count
        self._running = False

    def due(self, moment: Moment) -> bool:
        """At both ends of the window."""
        return moment.step == self._start or (self._running and moment.step >= self._stop)

    def at_step(self, moment: Moment) -> None:
        """Start or stop the trace, between steps that are finished."""
        jax.block_until_ready(moment.state.step)
        if not self._running:
            jax.profiler.start_trace(str(self._folder))
            self._running = True
        else:
            self.close()

    def close(self) -> None:
        """Stop a trace that is still running."""
        if self._running:
            jax.profiler.stop_trace()
            self._running = False
