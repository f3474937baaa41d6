"""What a compiled program communicates."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from dataclasses import dataclass

import numpy as np

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter", "ragged-all-to-all")
_OPERATION = re.compile(
    r"=\s+(?P<type>.*?)\s(?P<kind>" + "|".join(COLLECTIVES) + r")(?P<start>-start)?\((?P<operands>.*?)\)(?P<rest>.*)$",
    re.MULTILINE,
)
_SHAPE = re.compile(r"\b(pred|[a-z]+([0-9]+)(?:e[0-9]m[0-9][a-z0-9]*)?)\[([0-9,]*)\]")
# Of a mesh, its devices may be listed or reordered, and an axis may be taken in part, as `'a':(2)4`.
_GROUPS = re.compile(
    r"replica_groups=(\{(?:\{[0-9,]*\},?)*\}|\[[0-9,]+\]<=\[[0-9,]+\](?:T\([0-9,]+\))?"
    r"|mesh\[[^\]]*\](?:, device_ids=\([^{]*\))? \{[^}]*\}(?=,|$))"
)
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{[0-9]+,[0-9]+\},?)*)\}")
_MESH_AXIS = re.compile(r"'([^']+)'=([0-9]+)")
_TAKEN_AXIS = re.compile(r"'([^']+)'(?::\(([0-9]+)\)([0-9]+))?")
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
      parts: (element type, bytes) of each array that it produces.
      pairs: of a collective-permute, the devices (from, to).
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    name: str
    bytes: int = 0
    groups: tuple[tuple[int, ...], ...] = ()
    parts: tuple[tuple[str, int], ...] = ()
    pairs: tuple[tuple[int, ...], ...] = ()

    def bytes_between(self, devices_per_node: int) -> int:
        """Bytes that all devices together send to other nodes, of `devices_per_node` consecutive devices each.

        Raises:
          ValueError: a kind of which it is not known who sends what to whom, or groups that are not known.
        """
        if self.kind not in ("all-to-all", "all-gather", "reduce-scatter"):
            raise ValueError(f"bytes between nodes of a {self.kind}; expected an all-to-all, an all-gather or a reduce-scatter")
        if not self.groups:
            raise ValueError(f"bytes between nodes of the {self.kind} {self.name!r}; its groups are not listed in a known notation")
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
        written, kind, rest = match["type"], match["kind"], match["rest"]
        if match["start"] and kind != "all-reduce" and written.startswith("("):
            written = _second(written)  # behind it stands what it is given, before and after other things
        types = _SHAPE.findall(written)
        shapes = tuple(_numbers(dims) for _, _, dims in types)
        # `pred`, which names no width, takes a byte.
        parts = tuple((name, -(-int(bits or 8) * math.prod(s) // 8)) for (name, bits, _), s in zip(types, shapes, strict=True))
        name, groups, pairs = _NAME.search(rest), _GROUPS.search(rest), _PAIRS.search(rest)
        found.append(
            Collective(
                kind,
                shapes,
                name[1] if name else "",
                sum(size for _, size in parts),
                _groups(groups[1]) if groups else (),
                parts,
                _listed(pairs[1]) if pairs else (),
            )
        )
    return found


def count_collectives(hlo: str) -> dict[str, int]:
    """Number of collectives of each kind in optimised HLO text."""
    return dict(Counter(c.kind for c in collectives(hlo)))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


def _second(written: str) -> str:
    """Of the type of an operation that is only begun, (operands, results, ...), that of the results."""
    depth, starts = 0, [1]
    for place, letter in enumerate(written):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 1:
            starts.append(place + 1)
    return written[starts[1] : starts[2] - 1 if len(starts) > 2 else None] if len(starts) > 1 else written


def _listed(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(_numbers(group) for group in re.findall(r"\{([0-9,]+)\}", text))


@functools.cache
def _groups(text: str) -> tuple[tuple[int, ...], ...]:
    """Replica groups in any of their notations.

    They are listed, `{{0,1},{2,3}}`; or an iota reshaped, transposed and reshaped, `[groups,size]<=[dims]T(order)`; or, in newer
    versions, those along some axes of a mesh, `mesh['data'=2,'expert'=4] {'expert'}`, whose devices are consecutive or, behind
    `device_ids=`, an iota or a list. Of an axis `'expert':(2)4` are the 4 places behind the first factor 2 of its size.
    """
    if text.startswith("mesh"):
        head, taken = text.rsplit("{", 1)
        mesh, _, order = head.partition("], device_ids=(")
        sizes = {name: int(size) for name, size in _MESH_AXIS.findall(mesh)}
        parts = {name: (int(before or 1), int(size or sizes[name])) for name, before, size in _TAKEN_AXIS.findall(taken)}
        dims: list[int] = []
        inside: list[int] = []
        for name, size in sizes.items():
            before, part = parts.get(name, (size, 1))
            inside += [len(dims) + 1] if name in parts else []
            dims += [before, part, size // (before * part)]
        outermost = [axis for axis in range(len(dims)) if axis not in inside] + inside
        devices = _device_order(order.rpartition(")")[0]) if order else np.arange(math.prod(dims))
        groups = devices.reshape(dims).transpose(outermost).reshape(-1, math.prod(dims[axis] for axis in inside))
    elif text.startswith("{"):
        return _listed(text)
    else:
        groups = _iota(text)
    return tuple(map(tuple, groups.tolist()))


def _device_order(text: str) -> np.ndarray:
    """Devices of a mesh in its order: an iota reshaped and transposed, `[2,4]T(1,0)`, or all of them, `1,0,3,2`."""
    if not text.startswith("["):
        return np.array(_numbers(text))
    dims, order = (_numbers(part) for part in re.fullmatch(r"\[(.*?)\](?:T\((.*?)\))?", text).groups(""))  # type: ignore[union-attr]
    devices = np.arange(math.prod(dims)).reshape(dims)
    return (devices.transpose(order) if order else devices).reshape(-1)


def _iota(text: str) -> np.ndarray:
    shape, order = text.split("<=")
    return _device_order(order).reshape(_numbers(shape[1:-1]))
