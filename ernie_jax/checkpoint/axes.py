"""The axes of a published tensor against those of our array, as one expression read in both directions.

`"(h d) D -> layer D h d"`: the published matrix has h and d merged in its rows; ours keeps them apart behind D, stacked over
layers. A number is a fixed place: `"F D -> layer D 0 F"` fills half 0 of a pair. No values change, so both directions are exact.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_TOKEN = re.compile(r"\(([^)]*)\)|(\S+)")


def _atom(token: str) -> str | int:
    return int(token) if token.isdigit() else token


@dataclass(frozen=True)
class AxisMap:
    """A parsed expression.

    Attributes:
      hub: for each published dimension the names merged in it, or one fixed place.
      ours: for each of our dimensions its name or fixed place.
    """

    hub: tuple[tuple[str | int, ...], ...]
    ours: tuple[str | int, ...]

    @classmethod
    @functools.cache
    def parse(cls, expression: str) -> AxisMap:
        """`"published axes -> our axes"`."""
        left, right = expression.split("->")
        hub = tuple(tuple(_atom(t) for t in (m[1] or m[2]).split()) for m in _TOKEN.finditer(left))
        return cls(hub, tuple(_atom(t) for t in right.split()))

    @property
    def hub_names(self) -> tuple[str, ...]:
        """The names of the published side, in its order."""
        return tuple(name for dim in self.hub for name in dim if isinstance(name, str))

    @property
    def _order(self) -> tuple[int, ...]:
        names = self.hub_names
        return tuple(names.index(name) for name in self.ours if name in names)

    def sizes(self, shape: Sequence[int]) -> dict[str, int]:
        """The length of each name, from the shape of our array."""
        assert len(shape) == len(self.ours), (shape, self.ours)
        return {name: size for name, size in zip(self.ours, shape, strict=True) if isinstance(name, str)}

    def hub_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The published shape; a fixed place counts as the last of its dimension."""
        return tuple(math.prod(sizes[a] if isinstance(a, str) else a + 1 for a in dim) for dim in self.hub)

    def hub_region(self, sizes: Mapping[str, int], want: Mapping[str, slice]) -> tuple[slice, ...]:
        """The published rows and columns that hold `want`; of merged names the outermost is cut, the others are read whole."""
        region = []
        for dim in self.hub:
            first = dim[0]
            if isinstance(first, int):
                region.append(slice(first, first + 1))
                continue
            inner = math.prod(sizes[a] for a in dim[1:] if isinstance(a, str))
            region.append(slice(want[first].start * inner, want[first].stop * inner))
        return tuple(region)

    def to_ours(self, block: np.ndarray, sizes: Mapping[str, int], want: Mapping[str, slice]) -> np.ndarray:
        """What was read from `hub_region`, cut to `want`, with our free dimensions in our order (a view where possible)."""
        shape, cut = [], []
        for dim in self.hub:
            for place, name in enumerate(dim):
                if isinstance(name, str):
                    shape.append(sizes[name] if place else want[name].stop - want[name].start)
                    cut.append(want[name] if place else slice(None))
        return block.reshape(shape)[tuple(cut)].transpose(self._order)

    def to_hub(self, block: np.ndarray) -> np.ndarray:
        """Our block (free dimensions only, whole) as the published rows and columns it fills."""
        order = self._order
        atoms = block.transpose([order.index(i) for i in range(len(order))])
        sizes = dict(zip(self.hub_names, atoms.shape, strict=True))
        shape = [math.prod(sizes[a] for a in dim if isinstance(a, str)) for dim in self.hub]
        return np.ascontiguousarray(atoms).reshape(shape)
