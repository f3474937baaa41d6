"""The sizes of a run's step that its collectives follow from. n tokens of a device's microbatch, t tensor shards, D model."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ernie_jax.config.model import ModelConfig
from ernie_jax.config.remat import RematPlan, remat_plan, remat_within
from ernie_jax.config.run import RunConfig
from ernie_jax.config.segments import Segment, segments_of
from ernie_jax.models.decoder import kinds_of
from ernie_jax.plan.abstract_layout import abstract_layout
from ernie_jax.plan.model_weights import PlacedWeight, model_weights, placed_weights
from ernie_jax.sharding import BATCH_AXES
from ernie_jax.train.stages import pipelined_segment
from ernie_jax.train.state import moment_layout


@dataclass(frozen=True)
class StepSizes:
    """What a step's collectives follow from.

    Attributes:
      run: what is planned.
      mesh: axis -> size.
      weights: all that are trained.
      rows: of a microbatch on a device.
      dtype: of activations and of matrices where they are used, as HLO calls it.
    """

    run: RunConfig
    mesh: Mapping[str, int]
    weights: tuple[PlacedWeight, ...]
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
        found = placed_weights(model_weights(run.model, run.mtp_blocks > 0), layout, moment_layout(run, layout))
        if run.optimizer.gradient_compression != "none":
            # The data axis is summed over on its own, behind all microbatches.
            found = tuple(replace(each, summed_over=tuple(a for a in each.summed_over if a != "data")) for each in found)
        return cls(run, dict(layout.mesh.shape), found, rows, dtype)

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
    def kv_heads_split(self) -> bool:
        """Whether each tensor shard has kv heads of its own (see `make_layout`)."""
        return self.run.model.num_key_value_heads >= self.tensor

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return self.mesh["pipeline"]

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Axes over which a part of a step is split by the partitioner: with compressed gradients, data shards are apart."""
        return BATCH_AXES if self.run.optimizer.gradient_compression == "none" else ("expert",)

    @property
    def batch_shards(self) -> int:
        """Devices along them."""
        return math.prod(self.mesh[axis] for axis in self.batch_axes)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Of the decoder."""
        return _segments(self.run.model)

    @property
    def pipelined(self) -> int:
        """The segment that is spread over stages."""
        return pipelined_segment(self.run.model)

    def plan_of(self, unit: tuple[str, ...]) -> RematPlan:
        """What the policy keeps of a unit of layers."""
        return remat_plan(remat_within(self.run.remat, kinds_of(unit, self.run.model)))

    def weights_of(self, segment: int, place: int) -> list[PlacedWeight]:
        """Those of one place of a segment's unit."""
        return [each for each in self.weights if each.weight.place == (segment, place)]

    @property
    def without_zero(self) -> StepSizes:
        """With weights that are whole where they are used."""
        return replace(self, weights=tuple(replace(each, gathered_over=(), gathered=1) for each in self.weights))


@functools.lru_cache(maxsize=64)
def _segments(model: ModelConfig) -> tuple[Segment, ...]:
    return segments_of(model)


def kept(plan: RematPlan, tag: str) -> bool:
    """Whether the backward pass finds a tensor, on the device or in host memory."""
    return plan.everything or tag in plan.saved or tag in plan.offloaded


@dataclass(frozen=True)
class Times:
    """How often something runs in a step.

    Attributes:
      forwards: without what the backward pass runs again.
      backwards: with it.
      unread: of the forwards, those whose result nobody reads, which are not finished.
    """

    forwards: float
    backwards: float
    unread: float = 0.0

    @property
    def finished(self) -> float:
        """Forwards with a result."""
        return self.forwards - self.unread
