"""The weights of a model, found once for each model, and how a mesh splits them."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from flax import nnx

from ernie_jax.config.compute import ComputeConfig
from ernie_jax.config.model import ModelConfig
from ernie_jax.models import abstract_model
from ernie_jax.sharding import BATCH_AXES, Layout, logical_axes, variables_by_path
from ernie_jax.train.stages import cast_for_stages

_LAYER = re.compile(r"decoder/segments/(\d+)/layers/(\d+)/")
_SPLIT_BETWEEN_USES = ("embed", "expert_embed", "vision_embed")


@dataclass(frozen=True)
class ModelWeight:
    """A variable of a model.

    Attributes:
      path: its name in the state.
      shape, axes: sizes and logical axes.
      itemsize: bytes of a number.
      parameter: whether it can be trained; router biases and the places of experts cannot.
    """

    path: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    itemsize: int
    parameter: bool

    @cached_property
    def place(self) -> tuple[int, int] | None:
        """(segment, place in its unit) of a weight of a decoder's layer."""
        found = _LAYER.match(self.path)
        return None if found is None else (int(found[1]), int(found[2]))

    @cached_property
    def segment(self) -> int | None:
        """Number of the decoder's segment that it is a stack of, None outside."""
        return None if self.place is None else self.place[0]

    @cached_property
    def cast(self) -> bool:
        """Whether a step works with it in the compute format from the beginning, where stages are brought their weights."""
        return cast_for_stages(self.path, len(self.shape))

    @cached_property
    def layers(self) -> int:
        """Layers of its stack, 1 without."""
        return self.shape[0] if self.axes[0] == "layers" else 1

    @cached_property
    def size(self) -> int:
        """Elements of one layer."""
        return math.prod(self.shape) // self.layers

    @cached_property
    def is_expert(self) -> bool:
        """Whether it belongs to routed experts, which are split over the expert axis."""
        return "expert" in self.axes

    @cached_property
    def is_matrix(self) -> bool:
        """Whether it may be split further between uses; norms and gates are held whole."""
        return any(axis in _SPLIT_BETWEEN_USES for axis in self.axes)

    @cached_property
    def of_split_tokens(self) -> bool:
        """Whether it meets the tokens of a tensor shard alone: norms, gates, and the projection of multi-token prediction."""
        return not self.is_matrix or self.path == "mtp/block/projection/kernel"


@dataclass(frozen=True)
class PlacedWeight:
    """A weight on a mesh.

    Attributes:
      weight: what it is.
      used: elements of one layer as a device uses it: split over tensor, and experts over their axis, no further.
      gathered_over: batch axes over which it is split between uses, ZeRO 3.
      moments_over: batch axes over which its moments are split.
      summed_over: batch axes over which its gradient is summed; of experts those without the expert axis, on which each device
        has other experts.
      gathered, moments: devices of these axes together.
    """

    weight: ModelWeight
    used: float
    gathered_over: tuple[str, ...]
    moments_over: tuple[str, ...]
    summed_over: tuple[str, ...]
    gathered: int
    moments: int


@functools.lru_cache(maxsize=64)
def model_variables(model: ModelConfig, mtp: bool, movable: bool = False) -> tuple[ModelWeight, ...]:
    """All variables, with or without the blocks of multi-token prediction and the places of experts that move."""
    states = nnx.split(abstract_model(model, ComputeConfig(mtp=mtp, movable_experts=movable)), nnx.Param, ...)[1:]
    return tuple(
        ModelWeight(path, tuple(v.shape), logical_axes(v), v.dtype.itemsize, i == 0)
        for i, state in enumerate(states)
        for path, v in variables_by_path(state).items()
    )


@functools.lru_cache(maxsize=64)
def model_weights(model: ModelConfig, mtp: bool) -> tuple[ModelWeight, ...]:
    """Those that can be trained."""
    return tuple(weight for weight in model_variables(model, mtp) if weight.parameter)


def placed_weights(weights: Collection[ModelWeight], layout: Layout, moments: Layout) -> tuple[PlacedWeight, ...]:
    """Weights as a layout has them and another has their moments."""
    sizes = dict(layout.mesh.shape)
    tables = [dict(each.rules.table) for each in (layout, moments)]
    return tuple(_placed(weight, sizes, *tables) for weight in weights)


Table = Mapping[str, tuple[str, ...]]


def _placed(weight: ModelWeight, sizes: Mapping[str, int], rules: Table, moment_rules: Table) -> PlacedWeight:
    split = [name for axis in weight.axes if axis is not None for name in rules[axis]]
    of_moments = [name for axis in weight.axes if axis is not None for name in moment_rules[axis]]
    kept, batch = (("tensor", "expert"), ("data",)) if weight.is_expert else (("tensor",), BATCH_AXES)
    gathered_over, moments_over = (tuple(n for n in names if n in batch and sizes[n] > 1) for names in (split, of_moments))
    return PlacedWeight(
        weight,
        weight.size / math.prod(sizes[name] for name in split if name in kept),
        gathered_over,
        moments_over,
        batch,
        math.prod(sizes[name] for name in gathered_over),
        math.prod(sizes[name] for name in moments_over),
    )
