"""Timing several functions in turns, so that whatever else the machine does falls on all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping

import jax

FEWEST_ROUNDS = 3


def interleave(
    functions: Mapping[str, Callable[[], object]], repeats: int, max_seconds: float = float("inf"), *, warm_up: bool = True
) -> Iterator[dict[str, float]]:
    """Yields, `repeats` times, the seconds of one call of each function; every second round in reverse order.

    With `warm_up` calls each function once before, untimed: compilation and first-touch of memory are not part of it.
    On a slow or busy machine no round begins after `max_seconds` (warm-up included) once three are done.
    """
    begin = time.perf_counter()
    for function in functions.values() if warm_up else ():
        jax.block_until_ready(function())
    for i in range(repeats):
        if i >= FEWEST_ROUNDS and time.perf_counter() - begin > max_seconds:
            return
        seconds = {}
        for name in list(functions)[:: -1 if i % 2 else 1]:
            start = time.perf_counter()
            jax.block_until_ready(functions[name]())
            seconds[name] = time.perf_counter() - start
        yield seconds


def median_ratio(rounds: list[dict[str, float]], name: str, reference: str) -> float:
    """Median over the rounds of one function's time over another's in the same round."""
    return statistics.median(r[name] / r[reference] for r in rounds)
