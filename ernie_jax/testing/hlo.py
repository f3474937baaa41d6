"""What a compiled program communicates."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass

import numpy as np

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter", "ragged-all-to-all")
_OPERATION = re.compile(
    r"=\s+(?P<type>.*?)\s(?P<kind>" + "|".join(COLLECTIVES) + r")(?:-start)?\((?P<operands>.*?)\)(?P<rest>.*)$", re.MULTILINE
)
_SHAPE = re.compile(r"\b[a-z]+([0-9]+)(?:e[0-9]m[0-9](?:fn)?)?\[([0-9,]*)\]")
_GROUPS = re.compile(r"replica_groups=(\{(?:\{[0-9,]*\},?)*\}|\[[0-9,]+\]<=\[[0-9,]+\](?:T\([0-9,]+\))?)")
_NAME = re.compile(r'op_name="([^"]*)"')


@dataclass(frozen=True)
class Collective:
    """One collective of a compiled program, as one device sees it.

    Attributes:
      kind: one of `COLLECTIVES`.
      shapes: that it produces.
      name: the scope it comes from.
      bytes: of what it produces, a device's own part included.
      groups: numbers of the devices that take part together; empty where the program does not list them.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    name: str
    bytes: int = 0
    groups: tuple[tuple[int, ...], ...] = ()

    def bytes_between(self, devices_per_node: int) -> int:
        """Bytes that all devices together send to other nodes, of `devices_per_node` consecutive devices each.

        Raises:
          ValueError: a kind of which it is not known who sends what to whom.
        """
        if self.kind not in ("all-to-all", "all-gather", "reduce-scatter"):
            raise ValueError(f"bytes between nodes of a {self.kind}; expected an all-to-all, an all-gather or a reduce-scatter")
        total = 0
        for group in self.groups:
            nodes = [device // devices_per_node for device in group]
            # Of a reduce-scatter each device sends every peer as much as a peer keeps.
            each = self.bytes if self.kind == "reduce-scatter" else self.bytes // len(group)
            total += each * sum(a != b for a in nodes for b in nodes)
        return total


def collectives(hlo: str) -> list[Collective]:
    """The collectives of optimised HLO text (`compiled.as_text()`), each as often as it is written (a loop body once)."""
    found = []
    for match in _OPERATION.finditer(hlo):
        types = _SHAPE.findall(match["type"])
        shapes = tuple(_numbers(dims) for _, dims in types)
        size = sum(int(bits) // 8 * math.prod(shape) for (bits, _), shape in zip(types, shapes, strict=True))
        name, groups = _NAME.search(match["rest"]), _GROUPS.search(match["rest"])
        found.append(Collective(match["kind"], shapes, name[1] if name else "", size, _groups(groups[1]) if groups else ()))
    return found


def count_collectives(hlo: str) -> dict[str, int]:
    """Number of collectives of each kind in optimised HLO text."""
    return dict(Counter(c.kind for c in collectives(hlo)))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


def _groups(text: str) -> tuple[tuple[int, ...], ...]:
    """Replica groups from `{{0,1},{2,3}}` or from `[groups,size]<=[dims]T(order)`, an iota reshaped, transposed and reshaped."""
    if text.startswith("{"):
        return tuple(_numbers(group) for group in re.findall(r"\{([0-9,]+)\}", text))
    shape, dims, order = (_numbers(part) for part in re.fullmatch(r"\[(.*?)\]<=\[(.*?)\](?:T\((.*?)\))?", text).groups(""))  # type: ignore[union-attr]
    devices = np.arange(math.prod(dims)).reshape(dims)
    return tuple(map(tuple, (devices.transpose(order) if order else devices).reshape(shape).tolist()))
