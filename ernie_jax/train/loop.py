"""The training loop: batch, step, hooks; results are read one step late, so the devices never wait for the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from ernie_jax.train.hooks import Hook, Moment
from ernie_jax.train.preemption import StopSignal
from ernie_jax.train.records import Record, Throughput, to_host
from ernie_jax.train.state import TrainState
from ernie_jax.train.step import Metrics


class NonFiniteError(RuntimeError):
    """Too many steps in a row had a loss or gradient that is not finite."""


@dataclass
class Loop:
    """The steps of a run, from the state's to `steps`.

    Attributes:
      step_fn: `(state, batch) -> (state, metrics)`, compiled; it consumes the state.
      place: puts one batch of the pipeline onto the devices.
      hooks: what happens besides, in order.
      steps: where the run ends.
      max_nonfinite: skipped steps in a row after which the run stops.
      last_checkpoint: names the checkpoint to go back to, for the error message.
      note: what the host knows about a batch; becomes part of the step's record.
    """

    step_fn: Callable[[TrainState, Any], tuple[TrainState, Metrics]]
    place: Callable[[Any], Any]
    hooks: Sequence[Hook]
    steps: int
    max_nonfinite: int
    last_checkpoint: Callable[[], str]
    throughput: Throughput = field(default_factory=Throughput)
    last_record: Record | None = None
    note: Callable[[Any], Record] = lambda batch: {}

    def run(self, state: TrainState, batches: Iterator[Any], stop: StopSignal) -> TrainState:
        """Train until `steps`, or until a stop is asked for; returns the state there, which every hook has seen.

        Raises:
          NonFiniteError: `max_nonfinite` skipped steps in a row.
          ValueError: the data ended before the last step.
        """
        step, pending = int(state.step), None
        while step < self.steps:
            batch = self._next(batches, step)
            state, metrics = self.step_fn(state, self.place(batch))
            step += 1
            stopping = stop.requested(step)
            moment = Moment(step, state, batches, final=step == self.steps, stopping=stopping, notes=self.note(batch))
            # Before hooks that wait for this step, or the time they wait would be the last one's.
            if pending is not None:
                self._deliver(*pending)
            self._at_boundary(moment)
            state = moment.state
            pending = moment, metrics
            if stopping:
                break
        if pending is not None:
            self._deliver(*pending)
        return state

    def _next(self, batches: Iterator[Any], step: int) -> Any:
        try:
            return next(batches)
        except StopIteration:
            raise ValueError(
                f"the data ended after {step} of {self.steps} steps; lower config.steps, add data, or let it repeat (config.data)"
            ) from None

    def _at_boundary(self, moment: Moment) -> None:
        due = [hook for hook in self.hooks if hook.due(moment)]
        if any(hook.blocking for hook in due):
            # Waiting here puts the training time on training's account and the hook's on its own.
            jax.block_until_ready(moment.state.step)
        start = time.perf_counter()
        for hook in due:
            hook.at_step(moment)
        self.throughput.pause(time.perf_counter() - start)

    def _deliver(self, moment: Moment, metrics: Metrics) -> None:
        record: Record = {"step": moment.step, **to_host(metrics), **moment.notes}
        self.throughput.add(record["tokens"])
        self.last_record = record
        for hook in self.hooks:
            hook.at_record(record, moment.final or moment.stopping)
        skipped = record["skipped_in_a_row"]
        if skipped >= self.max_nonfinite:
            raise NonFiniteError(
                f"step {moment.step}: loss or gradient was not finite {skipped} steps in a row "
                f"(config.optimizer.max_nonfinite={self.max_nonfinite}); none of them changed the weights. "
                f"Last good checkpoint: {self.last_checkpoint()}. Lower the learning rate, look at the data from there, "
                "or raise config.optimizer.max_nonfinite"
            )
