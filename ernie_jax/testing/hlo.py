"""What a compiled program communicates."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter", "ragged-all-to-all")
_OPERATION = re.compile(
    r"=\s+(?P<type>.*?)\s(?P<kind>" + "|".join(COLLECTIVES) + r")(?:-start)?\((?P<operands>.*?)\)(?P<rest>.*)$", re.MULTILINE
)
_SHAPE = re.compile(r"\b[a-z]+[0-9]+(?:e[0-9]m[0-9](?:fn)?)?\[([0-9,]*)\]")
_NAME = re.compile(r'op_name="([^"]*)"')


@dataclass(frozen=True)
class Collective:
    """One collective of a compiled program: its kind, the shapes it produces and the scope it comes from."""

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    name: str


def collectives(hlo: str) -> list[Collective]:
    """The collectives of optimised HLO text (`compiled.as_text()`), each as often as it is written (a loop body once)."""
    found = []
    for match in _OPERATION.finditer(hlo):
        shapes = tuple(tuple(int(n) for n in dims.split(",") if n) for dims in _SHAPE.findall(match["type"]))
        name = _NAME.search(match["rest"])
        found.append(Collective(match["kind"], shapes, name[1] if name else ""))
    return found


def count_collectives(hlo: str) -> dict[str, int]:
    """Number of collectives of each kind in optimised HLO text."""
    return dict(Counter(c.kind for c in collectives(hlo)))
