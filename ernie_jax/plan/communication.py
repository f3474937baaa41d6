"""What a device communicates, collected by what it is and where it comes from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ernie_jax.plan.hlo import CollectiveUse
from ernie_jax.sharding import MESH_AXES

_BYTES = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "u16": 2, "u8": 1, "pred": 1}
TENSOR = ("tensor",)


class Communication:
    """Collectives of one device, added up.

    Args:
      sizes: mesh axis -> size.
      platform: backend; on `cpu` there are no collectives in bfloat16, and none that adds and splits at once.
    """

    def __init__(self, sizes: Mapping[str, int], platform: str) -> None:
        self.sizes, self.platform = dict(sizes), platform
        self._axes = [axis for axis in MESH_AXES if sizes[axis] > 1]
        self._found: dict[tuple[str, str, str, str, int], list[float]] = {}

    def add(
        self,
        kind: str,
        axes: Sequence[str],
        elements: float,
        dtype: str,
        times: float,
        scope: str,
        part: tuple[str, int] | None = None,
    ) -> None:
        """`times` collectives over these mesh axes, each of so many elements a device; nothing where the axes have one device.

        `part` is ("inner" or "outer", devices that talk) where only some of the axis do, neighbours or every so many.
        """
        if not times or not elements:
            return
        names = [axis for axis in self._axes if axis in axes]
        if not names or (part is not None and part[1] == 1):
            return
        dtype = "f32" if dtype == "bf16" and self.platform == "cpu" else dtype
        axis, devices = "+".join(names), math.prod(self.sizes[axis] for axis in names)
        if part is not None and part[1] < devices:
            axis, devices = f"{axis}/{part[0]}", part[1]
        key = kind, axis, scope, dtype, devices
        total = self._found.setdefault(key, [0.0, 0.0])
        total[0] += elements * _BYTES[dtype] * times
        total[1] += times

    def gather(self, axes: Sequence[str], elements: float, dtype: str, times: float, scope: str) -> None:
        """All-gathers with results of so many elements."""
        self.add("all-gather", axes, elements, dtype, times, scope)

    def sum(self, axes: Sequence[str], elements: float, dtype: str, times: float, scope: str) -> None:
        """All-reduces."""
        self.add("all-reduce", axes, elements, dtype, times, scope)

    def sum_split(self, axes: Sequence[str], elements: float, dtype: str, times: float, scope: str) -> None:
        """Sums of so many elements of which a device keeps its part: XLA:CPU sums all and slices, others reduce-scatter."""
        self.add("all-reduce" if self.platform == "cpu" else "reduce-scatter", axes, elements, dtype, times, scope)

    def copy(self) -> Communication:
        """The same so far, to go on from."""
        other = Communication(self.sizes, self.platform)
        other._found = {key: list(total) for key, total in self._found.items()}
        return other

    def uses(self) -> list[CollectiveUse]:
        """All that was added, most bytes first."""
        found = [
            CollectiveUse(kind, axis, round(size), times, scope, dtype, devices)
            for (kind, axis, scope, dtype, devices), (size, times) in self._found.items()
        ]
        return sorted(found, key=lambda use: -use.bytes)

    @property
    def bytes(self) -> float:
        """Of all together."""
        return sum(size for size, _ in self._found.values())
