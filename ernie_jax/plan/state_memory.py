"""What a run keeps from step to step, and its gradients, in bytes of one device: exact, from shapes and logical axes.

Nothing is traced but the model's shapes, once for each model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from flax import nnx

from ernie_jax.config.compute import ComputeConfig
from ernie_jax.config.model import ModelConfig
from ernie_jax.config.run import RunConfig
from ernie_jax.config.trainable import trained_paths
from ernie_jax.models import abstract_model
from ernie_jax.sharding import BATCH_AXES, Layout, logical_axes, variables_by_path
from ernie_jax.train.optimizer import is_gate
from ernie_jax.train.stages import cast_for_stages
from ernie_jax.train.state import LEAST_COMPRESSED

FLOAT = INT = 4


@dataclass(frozen=True)
class Weight:
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

    @property
    def segment(self) -> int | None:
        """Number of the decoder's segment that it is a stack of, None outside."""
        parts = self.path.split("/")
        return int(parts[2]) if parts[:2] == ["decoder", "segments"] else None

    @property
    def cast(self) -> bool:
        """Whether a step works with it in the compute format from the beginning, where stages are brought their weights."""
        return cast_for_stages(self.path, len(self.shape))


def weights_of(run: RunConfig) -> tuple[Weight, ...]:
    """All variables of a run's model."""
    return _weights(run.model, run.compute.mtp, run.compute.movable_experts)


@functools.lru_cache(maxsize=64)
def _weights(model: ModelConfig, mtp: bool, movable: bool) -> tuple[Weight, ...]:
    states = nnx.split(abstract_model(model, ComputeConfig(mtp=mtp, movable_experts=movable)), nnx.Param, ...)[1:]
    return tuple(
        Weight(path, tuple(v.shape), logical_axes(v), v.dtype.itemsize, i == 0)
        for i, state in enumerate(states)
        for path, v in variables_by_path(state).items()
    )


@functools.lru_cache(maxsize=64)
def trained_weights(model: ModelConfig, mtp: bool, movable: bool, patterns: tuple[str, ...], freeze: bool) -> tuple[Weight, ...]:
    """Those with gradients and moments, as `train.state.trained_values` chooses them."""
    weights = {w.path: w for w in _weights(model, mtp, movable) if w.parameter}
    return tuple(weights[path] for path in trained_paths(weights, patterns) if not (freeze and is_gate(path)))


def trained_of(run: RunConfig) -> tuple[Weight, ...]:
    """The weights that a run trains."""
    return trained_weights(run.model, run.compute.mtp, run.compute.movable_experts, tuple(run.trainable), run.moe.freeze_gate)


def elements(layout: Layout, without: Iterable[str] = ()) -> Callable[[Weight], int]:
    """A function from a weight to the numbers of it that a device has under a layout.

    Args:
      layout: mesh and rules.
      without: mesh axes over which it is whole.
    """
    left = {axis: size for axis, size in layout.mesh.shape.items() if axis not in set(without)}
    shards = {name: math.prod(left.get(axis, 1) for axis in axes) for name, axes in layout.rules.table}
    shards[""] = 1

    def of(weight: Weight) -> int:
        return math.prod(weight.shape) // math.prod(shards[axis or ""] for axis in weight.axes)

    return of


def state_bytes(run: RunConfig, layout: Layout, moments: Layout) -> Mapping[str, float]:
    """Category -> bytes of the arguments of a step: `parameters` (with router biases), `optimizer` (moments, average, what
    compression holds back), `batch`."""
    kept, moved, trained = elements(layout), elements(moments), trained_of(run)
    summed = sum(map(moved, trained)) * FLOAT
    optimizer: float = summed * (2 + (run.optimizer.ema_decay is not None))
    if run.optimizer.gradient_compression != "none":
        # As wide as the gradient before the sum over the data axis; the part that a device rounds once more in 8 bits.
        held = sum(n for n in map(kept, trained) if n >= LEAST_COMPRESSED) * FLOAT
        data = layout.axis_size("data")
        optimizer += held * (1 if run.optimizer.gradient_compression == "sparse" else 1 + 1 / data)
    # Steps taken, updates, and skipped steps in all and in a row; with a loss scale also its value and its finite steps.
    optimizer += (4 if run.optimizer.loss_scale is None else 6) * INT
    moe = run.model.moe
    if moe is not None and run.moe.placement_every:
        optimizer += run.model.num_moe_layers * moe.num_experts * FLOAT * (2 if moe.vision_intermediate_size else 1)
    return {
        "parameters": float(sum(kept(w) * w.itemsize for w in weights_of(run))),
        "optimizer": float(optimizer),
        "batch": float(batch_bytes(run, layout)),
    }


def batch_bytes(run: RunConfig, layout: Layout) -> int:
    """Bytes of a device's share of the arrays of `train.abstract_batch`."""
    rows = run.batch_size // layout.axis_size(*BATCH_AXES) * run.seq_len * INT
    vision = run.model.vision
    if vision is None:
        return 4 * rows
    # Three positions a token, and beside ids, labels and segments the modality, kind of document and place of the features.
    patches = run.parts * (run.data.max_patches or 0)
    of_patch = vision.in_channels * vision.patch_size**2 + 3 + 2 / vision.spatial_merge_size**2
    return 9 * rows + int(patches * of_patch * FLOAT)
