"""Stopping at a step boundary when the machine or a person asks for it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType

import jax
from jax.experimental import multihost_utils

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignal:
    """Inside a `with`, SIGTERM and SIGINT ask for a stop instead of killing; a second SIGINT interrupts at once.

    Over several hosts the decision is taken together: JAX's coordination service catches SIGTERM on any of them and names one
    step at which all stop.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._previous: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> StopSignal:
        # With several processes SIGTERM belongs to JAX's own preemption notifier.
        for number in _SIGNALS if jax.process_count() == 1 else ():
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name

    def requested(self, step: int) -> bool:
        """Whether to stop after `step` steps; every process gets the same answer."""
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            self.received = "SIGTERM"
        return self.received is not None
