"""The weights of a model by path, with shapes and logical axes, found once for each model."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from flax import nnx

from ernie_jax.config.compute import ComputeConfig
from ernie_jax.config.model import ModelConfig
from ernie_jax.models import abstract_model
from ernie_jax.sharding import Layout, logical_axes, variables_by_path

_LAYER = re.compile(r"decoder/segments/(\d+)/layers/(\d+)/")


@dataclass(frozen=True)
class ModelWeight:
    """A trained weight: its path, shape, and the logical axis of each dimension."""

    path: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]

    @property
    def place(self) -> tuple[int, int] | None:
        """(segment, place in its unit) of a weight of a decoder's layer."""
        found = _LAYER.match(self.path)
        return None if found is None else (int(found[1]), int(found[2]))

    @property
    def size(self) -> int:
        """Elements of one layer where layers are stacked, else of all."""
        return math.prod(self.shape[1:] if self.axes[0] == "layers" else self.shape)

    @property
    def layers(self) -> int:
        """Layers of its stack, 1 without."""
        return self.shape[0] if self.axes[0] == "layers" else 1

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to routed experts, which are split over the expert axis."""
        return "expert" in self.axes

    @property
    def is_matrix(self) -> bool:
        """Whether some of its axes may be split between steps; norms and gates are held whole."""
        return any(axis in ("embed", "expert_embed", "vision_embed") for axis in self.axes)

    def split_over(self, layout: Layout, only: Collection[str]) -> tuple[str, ...]:
        """The mesh axes among `only` that split it under the rules of a layout."""
        found = [name for axis in self.axes if axis is not None for name in layout.rules.mesh_axes(axis)]
        return tuple(name for name in found if name in only)

    def share(self, layout: Layout, sizes: Mapping[str, int], only: Collection[str]) -> float:
        """Elements of one layer on a device where the layout's rules split it over the mesh axes `only`."""
        return self.size / math.prod(sizes[name] for name in self.split_over(layout, only))


@functools.lru_cache(maxsize=16)
def model_weights(model: ModelConfig, mtp: bool) -> tuple[ModelWeight, ...]:
    """All weights that are trained, with or without the blocks of multi-token prediction."""
    params = nnx.state(abstract_model(model, ComputeConfig(mtp=mtp)), nnx.Param)
    return tuple(ModelWeight(path, tuple(v.shape), logical_axes(v)) for path, v in variables_by_path(params).items())
