"""A table laid over one model: every published tensor, and the block of our arrays that each part of it fills."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ernie_jax.checkpoint.axes import AxisMap
from ernie_jax.checkpoint.table import NUMBERING, Row, Stack, table_of
from ernie_jax.config.model import ModelConfig
from ernie_jax.config.segments import segments_of

Region = tuple[slice, ...]


@dataclass(frozen=True)
class Block:
    """One published tensor (or a fixed part of it) within one of our arrays.

    Attributes:
      hub: published name.
      path: our array.
      axes: how the dimensions correspond.
      place: for each of our dimensions, the one index the block has, or None where it spans the dimension.
    """

    hub: str
    path: str
    axes: AxisMap
    place: tuple[int | None, ...]

    def region(self, shape: Sequence[int]) -> Region:
        """The block as slices of our array."""
        return tuple(slice(0, n) if i is None else slice(i, i + 1) for i, n in zip(self.place, shape, strict=True))

    def within(self, region: Region) -> bool:
        """Whether any of the block lies in a region."""
        return all(i is None or s.start <= i < s.stop for i, s in zip(self.place, region, strict=True))


@dataclass(frozen=True)
class HubTensor:
    """A published tensor: name, shape, whether it is float32 whatever the others are, and where it goes."""

    name: str
    shape: tuple[int, ...]
    float32: bool
    blocks: tuple[Block, ...]


def hub_tensors(
    config: ModelConfig, shapes: Mapping[str, Sequence[int]], places: Mapping[str, np.ndarray] | None = None
) -> dict[str, HubTensor]:
    """Every tensor of the published checkpoint of a model, by name, in the order of its layers.

    Args:
      config: the model.
      shapes: shape of each of its variables, by path; without tables of places, which no checkpoint has.
      places: path of such a table -> [R, E], where experts do not stand in the order of their numbers.

    Raises:
      ValueError: a variable without a row.
    """
    rows = table_of(config)
    found: dict[str, list[tuple[Row, Block, tuple[int, ...]]]] = defaultdict(list)
    for path, shape in shapes.items():
        matches = [(row, match) for row in rows if (match := _path_pattern(row.ours).fullmatch(path))]
        if not matches:
            # Such a variable would be lost on export and stay random after import.
            raise ValueError(f"the weight table has no row for variable {path} of shape {tuple(shape)}; add one to table.py")
        for row, match in matches:
            axes = AxisMap.parse(row.axes)
            hub_shape = axes.hub_shape(axes.sizes(shape))
            for block in _expand(row, axes, path, shape, config, match.groupdict(), places or {}):
                found[block.hub].append((row, block, hub_shape))
    tensors = {
        name: HubTensor(
            name,
            tuple(max(sizes) for sizes in zip(*(shape for _, _, shape in parts), strict=True)),
            parts[0][0].float32,
            tuple(block for _, block, _ in parts),
        )
        for name, parts in found.items()
    }
    return dict(sorted(tensors.items(), key=lambda item: natural_order(item[0])))


def natural_order(name: str) -> list[tuple[int, int | str]]:
    """A sort key under which layer 2 comes before layer 10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]


def _path_pattern(ours: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>\\d+)", re.escape(ours)))


def _expand(
    row: Row,
    axes: AxisMap,
    path: str,
    shape: Sequence[int],
    config: ModelConfig,
    at: Mapping[str, str],
    places: Mapping[str, np.ndarray],
) -> Iterator[Block]:
    stack = Stack(segments_of(config)[int(at["segment"])], int(at["unit"])) if "segment" in at else None
    numbered = [name for name in axes.ours if isinstance(name, str) and f"{{{name}}}" in row.hub]
    sizes = axes.sizes(shape)
    table = places.get(f"{path.rpartition('/')[0]}/place")
    for numbers_of in itertools.product(*(range(sizes[name]) for name in numbered)):
        chosen = dict(zip(numbered, numbers_of, strict=True))
        numbers = {name: NUMBERING[name](place, config, stack) for name, place in chosen.items()}
        if table is not None:
            # The tensor of expert e of this layer lies where the expert stands.
            chosen |= {name: int(table[chosen["layer"], e]) for name, e in chosen.items() if name.endswith("expert")}
        place = tuple(name if isinstance(name, int) else chosen.get(name) for name in axes.ours)
        yield Block(row.hub.format(**numbers), path, axes, place)
