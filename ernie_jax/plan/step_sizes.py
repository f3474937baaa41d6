"""The sizes of a run's step that its collectives follow from. n tokens of a device's microbatch, t tensor shards, D model."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from ernie_jax.config.model import ModelConfig
from ernie_jax.config.remat import RematPlan, remat_plan, remat_within
from ernie_jax.config.run import RunConfig
from ernie_jax.config.segments import Segment, segments_of
from ernie_jax.models.decoder import kinds_of
from ernie_jax.plan.abstract_layout import abstract_layout
from ernie_jax.plan.model_weights import ModelWeight, model_weights
from ernie_jax.sharding import BATCH_AXES, Layout
from ernie_jax.train.state import moment_layout


@dataclass(frozen=True)
class StepSizes:
    """Attributes:
    run, layout: what is planned.
    moments: layout of moments and of gradients behind their sum.
    rows: of a microbatch on a device.
    dtype: of activations and of matrices where they are used, as HLO calls it.
    """

    run: RunConfig
    layout: Layout
    moments: Layout
    rows: int
    dtype: str

    @classmethod
    def of(cls, run: RunConfig) -> StepSizes:
        """Of a run whose mesh has its sizes.

        Raises:
          ValueError: an axis of -1; sizes that the mesh does not divide.
        """
        layout = abstract_layout(run)
        rows = math.ceil(run.batch_size / run.parts / layout.axis_size(*BATCH_AXES))
        dtype = "f32" if run.computed_in == "float32" else "bf16"
        return cls(run, layout, moment_layout(run, layout), rows, dtype)

    @property
    def mesh(self) -> dict[str, int]:
        """Axis -> size."""
        return dict(self.layout.mesh.shape)

    @property
    def tokens(self) -> int:
        """n, of a microbatch; with a tensor axis a whole row of it is on each of its devices."""
        return self.rows * self.run.seq_len

    @property
    def stream(self) -> int:
        """n D, elements of a microbatch's activations."""
        return self.tokens * self.run.model.hidden_size

    @property
    def tensor(self) -> int:
        """t."""
        return self.mesh["tensor"]

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return self.mesh["pipeline"]

    @property
    def batch_shards(self) -> int:
        """Devices that share a batch."""
        return self.layout.axis_size(*BATCH_AXES)

    @property
    def weights(self) -> tuple[ModelWeight, ...]:
        """All that are trained."""
        return model_weights(self.run.model, self.run.mtp_blocks > 0)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Of the decoder."""
        return _segments(self.run.model)

    def plan_of(self, unit: tuple[str, ...]) -> RematPlan:
        """What the policy keeps of a unit of layers."""
        return remat_plan(remat_within(self.run.remat, kinds_of(unit, self.run.model)))

    def whole(self, weight: ModelWeight) -> float:
        """Elements of one layer's weight as a device uses it: split over tensor, and experts over their axis, no further."""
        return weight.share(self.layout, self.mesh, ("tensor", "expert") if weight.is_expert else ("tensor",))

    def gathered_over(self, weight: ModelWeight) -> tuple[str, ...]:
        """The batch axes over which a weight is split between uses (ZeRO 3)."""
        return self._over(weight, self.layout)

    def moments_over(self, weight: ModelWeight) -> tuple[str, ...]:
        """The batch axes over which its moments are split."""
        return self._over(weight, self.moments)

    def summed_over(self, weight: ModelWeight) -> tuple[str, ...]:
        """The batch axes over which its gradient is summed: experts have other tokens on each of theirs already."""
        return ("data",) if weight.is_expert else BATCH_AXES

    def part(self, weight: ModelWeight, axes: tuple[str, ...]) -> float:
        """`whole`, split over further mesh axes."""
        return self.whole(weight) / math.prod(self.mesh[axis] for axis in axes)

    def _over(self, weight: ModelWeight, layout: Layout) -> tuple[str, ...]:
        return weight.split_over(layout, ("data",) if weight.is_expert else BATCH_AXES)


@functools.lru_cache(maxsize=64)
def _segments(model: ModelConfig) -> tuple[Segment, ...]:
    return segments_of(model)


def kept(plan: RematPlan, tag: str) -> bool:
    """Whether the backward pass finds a tensor, on the device or in host memory."""
    return plan.everything or tag in plan.saved or tag in plan.offloaded


__all__: list[Any] = ["StepSizes", "kept"]
