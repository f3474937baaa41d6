"""What a compiled program shows beside what was predicted of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Comparison:
    """One figure of both.

    Attributes:
      name: what it is of: "memory of a device", "all-to-all over expert".
      predicted, compiled: the figures.
      unit: "GiB", "bytes", "count".
    """

    name: str
    predicted: float
    compiled: float
    unit: str = ""

    @property
    def difference(self) -> float | None:
        """Of the prediction, as a share of the compiled figure; None where that is 0 and the prediction is not."""
        if self.compiled:
            return self.predicted / self.compiled - 1
        return None if self.predicted else 0.0


class Compared(Protocol):
    """What `plan.compiled` has, for reports."""

    @property
    def rows(self) -> Sequence[Comparison]:
        """Figure by figure."""
        ...
