"""Names for groups of devices: along which axes of a mesh they talk. N devices, in the row-major order of the mesh."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ernie_jax.sharding.mesh import MESH_AXES

Groups = tuple[tuple[int, ...], ...]
UNKNOWN = "?"


@dataclass(frozen=True)
class _Axes:
    """Some axes of the mesh: for each device the lowest number in its group (`label`), and its place in the group."""

    name: str
    size: int
    label: np.ndarray
    place: np.ndarray


class MeshGroups:
    """The groups that each combination of a mesh's axes makes, to be found by their devices."""

    def __init__(self, mesh_shape: Mapping[str, int]) -> None:
        """Of a mesh with these axes, in whatever order they are given.

        Raises:
          ValueError: an axis that `MESH_AXES` does not have.
        """
        if unknown := set(mesh_shape) - set(MESH_AXES):
            raise ValueError(f"mesh axes {', '.join(sorted(unknown))}; expected some of {', '.join(MESH_AXES)}")
        sizes = {axis: mesh_shape[axis] for axis in MESH_AXES if mesh_shape.get(axis, 1) > 1}
        self.devices = math.prod(sizes.values())
        self._coordinates = dict(zip(sizes, np.indices(tuple(sizes.values())).reshape(len(sizes), self.devices), strict=True))
        self._combinations = sorted(self._all(sizes), key=lambda axes: axes.size)
        self._by_label = {axes.label.tobytes(): axes for axes in self._combinations}
        self._known: dict[Groups, tuple[str, int]] = {}

    def _all(self, sizes: Mapping[str, int]) -> list[_Axes]:
        numbers = np.arange(self.devices).reshape(tuple(sizes.values()))
        found = []
        for count in range(1, len(sizes) + 1):
            for names in itertools.combinations(sizes, count):
                along = tuple(list(sizes).index(name) for name in names)
                label = np.broadcast_to(numbers.min(axis=along, keepdims=True), numbers.shape).reshape(-1)
                place = np.zeros(self.devices, np.int64)
                for name in names:
                    place = place * sizes[name] + self._coordinates[name]
                found.append(_Axes("+".join(names), math.prod(sizes[name] for name in names), label, place))
        return found

    def talking(self, groups: Groups) -> tuple[str, int]:
        """Name of the axes along which groups of devices talk, and devices in a group.

        The name is that of the axes, joined by "+". A part of the fewest axes whose groups hold these is `expert/inner` where
        it is neighbours along them, `expert/outer` where it is every so many (the two steps of an exchange in two levels), and
        `expert/part` otherwise. "" is a device on its own, "?" what fits none of these.

        Args:
          groups: numbers of devices; empty for all of them together.

        Raises:
          ValueError: a device that the mesh does not have.
        """
        if not groups:
            return "+".join(self._coordinates), self.devices
        if groups not in self._known:
            self._known[groups] = self._look_up(groups)
        return self._known[groups]

    def _look_up(self, groups: Groups) -> tuple[str, int]:
        size = max(map(len, groups))
        self._check(max(max(group, default=0) for group in groups))
        if size == 1:
            return "", 1
        if min(map(len, groups)) != size or sorted(itertools.chain(*groups)) != list(range(self.devices)):
            return UNKNOWN, size
        table = np.sort(np.array(groups), axis=1)
        label = np.empty(self.devices, np.int64)
        label[table] = table[:, :1]
        if (axes := self._by_label.get(label.tobytes())) is not None:
            return axes.name, size
        for axes in self._combinations:
            inside = axes.label[table]
            if (inside == inside[:, :1]).all():
                steps = np.diff(np.sort(axes.place[table], axis=1), axis=1)
                kind = "inner" if (steps == 1).all() else "outer" if (steps == axes.size // size).all() else "part"
                return f"{axes.name}/{kind}", size
        return UNKNOWN, size

    def sending(self, pairs: Groups) -> tuple[str, int]:
        """The same of pairs (from, to): the axes along which any of them differ, and how many devices those join."""
        if pairs not in self._known:
            self._check(max(itertools.chain(*pairs), default=0))
            source, target = np.array(pairs, np.int64).reshape(-1, 2).T
            differ = [name for name, at in self._coordinates.items() if (at[source] != at[target]).any()]
            size = math.prod(int(self._coordinates[name].max()) + 1 for name in differ)
            self._known[pairs] = "+".join(differ), size
        return self._known[pairs]

    def _check(self, highest: int) -> None:
        if highest >= self.devices:
            raise ValueError(
                f"the program names device {highest}, but the mesh has {self.devices}; pass the mesh that it was compiled for"
            )
