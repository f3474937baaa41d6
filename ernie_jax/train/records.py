"""What a step leaves behind on the host: one record of plain numbers, and the file of them. L MoE layers, E experts."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ernie_jax.train.flops import Peak

Record = dict[str, Any]


class Throughput:
    """Tokens a second since the last mark, and over the run without its first step (which compiles); pauses do not count."""

    def __init__(self) -> None:
        now = time.perf_counter()
        self._last, self._tokens = now, 0.0
        self._start: float | None = None
        self._total = 0.0
        self._seconds = 0.0

    def add(self, tokens: float) -> None:
        """A step over `tokens` tokens has just been seen to finish."""
        now = time.perf_counter()
        self._tokens += tokens
        if self._start is not None:
            self._total += tokens
            self._seconds += now - self._start
        self._start = now

    def pause(self, seconds: float) -> None:
        """The last `seconds` went to something other than training."""
        self._last += seconds
        if self._start is not None:
            self._start += seconds

    def mark(self) -> float:
        """Tokens a second since the last mark."""
        now = time.perf_counter()
        rate = self._tokens / max(now - self._last, 1e-9)
        self._last, self._tokens = now, 0.0
        return rate

    @property
    def overall(self) -> float | None:
        """Tokens a second over all steps but the first; None before the second."""
        return self._total / self._seconds if self._seconds > 0 else None


def to_host(metrics: Mapping[str, Any]) -> Record:
    """A step's metrics as Python numbers and lists, waiting for the step; what is not finite becomes None (JSON has no NaN)."""
    return {key: _plain(value) for key, value in jax.device_get(dict(metrics)).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    array = np.asarray(value)
    if array.ndim:
        return [_plain(v) for v in array]
    number = array.item()
    return number if isinstance(number, int) or math.isfinite(number) else None


def mfu(tokens_per_s: float, flops_per_token: float, peak: Peak) -> float | None:
    """Model FLOPs utilisation in 0..1, None without a known peak."""
    return None if peak.flops is None else tokens_per_s * flops_per_token / peak.flops


def read_records(path: str | Path) -> list[Record]:
    """The records of a `metrics.jsonl`; a last line cut off by a kill is left out, a missing file has none.

    Raises:
      ValueError: a broken line that is not the last.
    """
    path = Path(path)
    lines = path.read_text().splitlines() if path.exists() else []
    records: list[Record] = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise ValueError(f"{path}:{number} is not a JSON object; repair or remove the line") from None
    return records


def rewind_records(path: str | Path, step: int) -> list[Record]:
    """Drop the records after `step` from the file, so that a resumed run's file reads as one run; returns those kept."""
    path = Path(path)
    kept = [r for r in read_records(path) if r["step"] <= step]
    if path.exists():
        rewritten = path.with_suffix(".tmp")
        rewritten.write_text("".join(json.dumps(r) + "\n" for r in kept))
        rewritten.replace(path)
    return kept
