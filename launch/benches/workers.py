"""Sides of a comparison, each in a process of its own: thread pools and memory are apart, and one runs at a time.

A side is an object made by a factory `module:name` from a dictionary of options. Its module's `load()` brings up the libraries,
its `facts` say what it found when it was made, and `run(part)` does one unit of work and waits for it.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Protocol

from benches.interleaved import FEWEST_ROUNDS
from benches.memory import peak_bytes, reset_peak, resident_bytes, trim


class Side(Protocol):
    """What runs inside a worker."""

    facts: dict[str, Any]
    parts: Sequence[str]

    def run(self, part: str) -> object:
        """One unit of work, finished when this returns; what it returns is kept for `results`."""
        ...


class Worker:
    """A side in its own process; use as a context manager."""

    def __init__(self, factory: str, options: Mapping[str, Any], *, environment: Mapping[str, str] | None = None) -> None:
        """Starts the process and waits until the side is made.

        Args:
          factory: `module:name` of what makes the side.
          options: passed to it.
          environment: variables set before the process starts.

        Raises:
          ValueError: what the factory refused.
          RuntimeError: any other failure, with its traceback.
        """
        # Processor seconds of all runs so far, counted or not.
        self.spent = 0.0
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        before = {name: os.environ.get(name) for name in environment or {}}
        os.environ.update(environment or {})
        try:
            self._process = context.Process(target=_serve, args=(other, factory, dict(options)), daemon=True)
            self._process.start()
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        other.close()
        try:
            facts, parts = self._receive()
        except BaseException:
            self.close()
            raise
        self.facts: dict[str, Any] = facts
        self.parts: int = parts

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process."""
        self._pipe.close()
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()

    def run(self, *, in_turn: bool = False) -> dict[str, dict[str, float]]:
        """One run of every part: part -> {"seconds", "cpu_seconds"}; processor time is that of all threads of the process.

        In turn with others each runs twice and the second run counts: as in a loop of them. The first meets what waiting has
        left: threads of the side before that still spin (OpenMP's do, for 0.2 s), and memory that the system has taken back
        meanwhile. On a virtual machine whose idle pages go to its host, getting them again cost a training step 1.5 s of system
        time.
        """
        parts, spent = self._ask("run in turn" if in_turn else "run")
        self.spent += spent
        return parts  # type: ignore[no-any-return]

    def reset_peak(self) -> None:
        """Hands freed memory back and counts the peak from now."""
        self._ask("reset_peak")

    def memory(self) -> dict[str, int | None]:
        """Resident bytes: `peak` since the reset and `net`, that peak without what the libraries held before the side was made."""
        return self._ask("memory")  # type: ignore[no-any-return]

    def results(self) -> dict[str, list[Any]]:
        """Part -> what each of its runs returned."""
        return self._ask("results")  # type: ignore[no-any-return]

    def final(self) -> dict[str, Any]:
        """What the side's own `final()` finds out once nothing more is timed; empty of a side without one."""
        return self._ask("final")  # type: ignore[no-any-return]

    def _ask(self, what: str) -> Any:
        self._pipe.send(what)
        return self._receive()

    def _receive(self) -> Any:
        try:
            kind, value = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"a worker process ended with exit code {self._process.exitcode}") from None
        if kind == "refused":
            raise ValueError(value)
        if kind == "failed":
            raise RuntimeError(f"a worker process failed:\n{value}")
        return value


def take_turns(
    workers: Mapping[str, Worker], repeats: int, max_seconds: float = float("inf"), *, warm_up: int = 1
) -> Iterator[dict[str, dict[str, dict[str, float]]]]:
    """Yields, `repeats` times, one run of each worker by name, in turn where there are several or one has several parts.

    Every second round goes in reverse order.

    Each runs `warm_up` times before, untimed, and the peaks of memory count from there. No round begins after `max_seconds`
    once three are done.
    """
    for worker in workers.values():
        for _ in range(warm_up):
            worker.run()
        worker.reset_peak()
    begin = time.perf_counter()
    for i in range(repeats):
        if i >= FEWEST_ROUNDS and time.perf_counter() - begin > max_seconds:
            return
        order = list(workers)[:: -1 if i % 2 else 1]
        yield {name: workers[name].run(in_turn=len(workers) > 1 or workers[name].parts > 1) for name in order}


def _serve(pipe: Connection, factory: str, options: dict[str, Any]) -> None:
    """The worker's process: makes the side, then answers until the pipe closes."""
    try:
        module_name, name = factory.split(":")
        module = importlib.import_module(module_name)
        module.load()
        trim()
        libraries = resident_bytes()
        side: Side = getattr(module, name)(options)
        pipe.send(("ok", (side.facts, len(side.parts))))
        _answer(pipe, side, libraries)
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return
    except ValueError as error:
        pipe.send(("refused", str(error)))
    except Exception:
        pipe.send(("failed", traceback.format_exc()))


def _answer(pipe: Connection, side: Side, libraries: int | None) -> None:
    results: dict[str, list[object]] = {part: [] for part in side.parts}
    counted = False
    while True:
        question = pipe.recv()
        answer: object = None
        if question in ("run", "run in turn"):
            before = time.process_time()
            runs = 2 if question == "run in turn" else 1
            answer = {part: [_timed(side, part, results[part]) for _ in range(runs)][-1] for part in side.parts}
            answer = answer, time.process_time() - before
        elif question == "reset_peak":
            trim()
            counted = reset_peak()
        elif question == "memory":
            peak = peak_bytes() if counted else None
            answer = {"peak": peak, "net": None if peak is None or libraries is None else peak - libraries}
        elif question == "results":
            answer = results
        elif question == "final":
            answer = getattr(side, "final", dict)()
        pipe.send(("ok", answer))


def _timed(side: Side, part: str, results: list[object]) -> dict[str, float]:
    processor, start = time.process_time(), time.perf_counter()
    result = side.run(part)
    seconds = time.perf_counter() - start
    results.append(result)
    return {"seconds": seconds, "cpu_seconds": time.process_time() - processor}
