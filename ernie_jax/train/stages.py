"""The weights of a model by where a pipeline has them. S stages, v chunks a stage, C repeats a chunk, R repeats of a segment.

The segment with most layers is spread over the stages. What comes before it (the embedding, a dense prefix) belongs to the
first virtual stage, what comes after (other layers, final norm, head, blocks of multi-token prediction and loss) to the last;
those weights every stage holds for the length of a step, so that a tied embedding has one gradient, their sum. The vision tower
and resampler belong to no stage.

Between steps every stage keeps a part of every matrix (see `sharding.make_layout`). A step brings the layers of a stage together
once, in the compute format, and takes their gradients back once, whatever the schedule and the number of layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from ernie_jax.config.run import RunConfig
from ernie_jax.config.segments import segments_of
from ernie_jax.models import TextModel, abstract_model
from ernie_jax.models.decoder import DecoderSegment
from ernie_jax.parallel.pipeline import StagePlan
from ernie_jax.sharding import Layout, logical_axes, variables_by_path
from ernie_jax.train.moe_layers import moe_stacks
from ernie_jax.train.optimizer import Arrays
from ernie_jax.train.state import with_values

_OF_TOWER = ("vision_tower/", "resampler/")


def pipelined_segment(run: RunConfig) -> int:
    """Which segment of the decoder is spread over the stages: the one with most layers, the first of equals."""
    segments = segments_of(run.model)
    return max(range(len(segments)), key=lambda i: (segments[i].repeats * len(segments[i].unit), -i))


def cast_for_stages(path: str, ndim: int) -> bool:
    """Whether a weight is brought to the stages in the compute format: matrices of layers, which are used in no other.

    Embedding and head stay float32: the gradient of several uses is added up in the format of the weight.
    """
    return path.startswith(("decoder/segments/", "mtp/")) and ndim > 2 and "router" not in path


@dataclass(frozen=True)
class StageWeights:
    """Weights by path: of the ends of the pipeline, of its chunks [S, v, C, ...] (paths within the segment), of the tower."""

    edges: Arrays
    stages: Arrays
    tower: Arrays


class ModelStages:
    """How a run's model is cut for a mesh with stages.

    Attributes:
      segment: which segment of the decoder is spread.
      plan: its repeats by stage.
      moe_layers: for each MoE layer of its unit, the number of every repeat's among all MoE layers.
      before, behind: numbers of the MoE layers of the segments before and behind it.

    Raises:
      ValueError: fewer repeats than virtual stages.
    """

    def __init__(self, run: RunConfig, layout: Layout) -> None:
        model = abstract_model(run.model, run.compute, layout)
        self.layout, self.dtypes = layout, model.dtypes
        self.segment = pipelined_segment(run)
        self.prefix = f"decoder/segments/{self.segment}/"
        repeats = segments_of(run.model)[self.segment].repeats
        self.plan = StagePlan.spread(repeats, layout.mesh.shape["pipeline"], run.pipeline.virtual_stages)
        places = [(int(stack.path.split("/")[2]), stack.layers) for stack in moe_stacks(run.model)]
        self.moe_layers = [layers for segment, layers in places if segment == self.segment]
        self.before = sorted(layer for segment, layers in places if segment < self.segment for layer in layers)
        self.behind = sorted(layer for segment, layers in places if segment > self.segment for layer in layers)
        self._model: tuple[Any, nnx.State, nnx.State] = tuple(nnx.split(model, nnx.Param, ...))  # type: ignore[assignment]
        self._chunk: tuple[Any, Any] = nnx.split(model.decoder.segments[self.segment])
        self._axes = {path: logical_axes(v) for state in self._model[1:] for path, v in variables_by_path(state).items()}

    def split(self, values: Arrays) -> StageWeights:
        """Weights by path, each group where it is to be for the step."""
        tower = {path: value for path, value in values.items() if path.startswith(_OF_TOWER)}
        edges, stages = {}, {}
        for path, value in values.items():
            if path in tower:
                continue
            if cast_for_stages(path, value.ndim):
                # A layer would do so where it uses it; here it halves what is sent and held.
                value = self.dtypes.cast(value)
            kept = value.dtype
            # XLA:CPU would send 16-bit floats as float32.
            bits = value
            if kept.itemsize == 2:
                # Pinned where it is kept: the partitioner would otherwise move the numbers before the cast.
                bits = self._constrained(jax.lax.bitcast_convert_type(value, jnp.uint16), self.layout.spec(self._axes[path]))
            if path.startswith(self.prefix):
                where = PartitionSpec("pipeline", None, None, *self._of_stage(self._axes[path][1:]))
                placed = self._constrained(self.plan.to_stages(bits), where)
                stages[path.removeprefix(self.prefix)] = jax.lax.bitcast_convert_type(placed, kept)
            else:
                placed = self._constrained(bits, self._of_stage(self._axes[path]))
                edges[path] = jax.lax.bitcast_convert_type(placed, kept)
        return StageWeights(edges, stages, tower)

    def join(self, gradients: StageWeights, layout: Layout) -> Arrays:
        """Gradients by path, staged ones as [R, ...] again.

        Args:
          gradients: as a pipeline gives them.
          layout: of gradients while they are summed.
        """
        found = {**gradients.edges, **gradients.tower}
        for path, value in gradients.stages.items():
            path = self.prefix + path
            flat = value.reshape(-1, *value.shape[3:])
            # Each stage gives away parts of its layers; only then does the order of the layers no longer concern the devices.
            flat = self._constrained(flat, layout.spec(self._axes[path]))
            found[path] = self.plan.from_stages(flat.reshape(value.shape))
        return found

    def placed(self, edges: Arrays, stages: Arrays, layout: Layout) -> tuple[Arrays, Arrays]:
        """Gradients being summed inside a stage, [v, C, ...] of its chunks, constrained to where `layout` keeps them."""

        def place(value: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
            return jax.lax.with_sharding_constraint(value, layout.sharding(axes))

        return (
            {path: place(value, self._axes[path]) for path, value in edges.items()},
            {path: place(value, (None, *self._axes[self.prefix + path])) for path, value in stages.items()},
        )

    def gathered(self, statistics: jax.Array) -> jax.Array:
        """Statistics [S, v, C, ...] of all stages as [R, ...] on every device."""
        return self.plan.from_stages(self._constrained(statistics, PartitionSpec()))

    def model(self, *values: Arrays) -> TextModel:
        """The model with these weights by path; others are shapes only."""
        graphdef, params, biases = self._model
        given = {path: value for some in values for path, value in some.items()}
        model: TextModel = nnx.merge(graphdef, with_values(params, given), with_values(biases, given))
        return model

    def chunk(self, *values: Arrays) -> DecoderSegment:
        """The layers of one chunk with these weights [C, ...] by path within the segment."""
        graphdef, state = self._chunk
        given = {path: value for some in values for path, value in some.items()}
        segment: DecoderSegment = nnx.merge(graphdef, with_values(state, given))
        return segment

    def _of_stage(self, axes: tuple[str | None, ...]) -> PartitionSpec:
        """Where a weight is within a stage: its spec without the pipeline axis."""
        parts: list[Any] = []
        for part in self.layout.spec(axes):
            names = () if part is None else (part,) if isinstance(part, str) else part
            left = tuple(name for name in names if name != "pipeline")
            parts.append(left or None)
        return PartitionSpec(*parts)

    def _constrained(self, value: jax.Array, spec: PartitionSpec) -> jax.Array:
        return jax.lax.with_sharding_constraint(value, NamedSharding(self.layout.mesh, spec))
