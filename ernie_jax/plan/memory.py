"""The memory of a training step before any device exists: bytes of one device of each pipeline stage, by category.

A step's program needs its arguments (what `state_memory` counts) and, at its fullest moment, the gradients, activations and
buffers that are alive together. The moments that can be the fullest are few: the backward pass of a stack of layers, that of the
loss, the end of the pass with all gradients, and the update. Each is a sum of arrays with a formula; the largest is the prediction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ernie_jax.config.run import RunConfig
from ernie_jax.plan.abstract_layout import abstract_layout
from ernie_jax.plan.activation_memory import Bytes, LayerSizes
from ernie_jax.plan.pipeline_memory import pipeline_moments
from ernie_jax.plan.state_memory import state_bytes
from ernie_jax.plan.step_memory import step_moments
from ernie_jax.train.gradients import check_batch_size
from ernie_jax.train.remat_prediction import StepShape
from ernie_jax.train.state import moment_layout

CATEGORIES = ("parameters", "optimizer", "gradients", "activations", "dispatch", "logits", "collectives", "workspace", "batch")


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one device of one pipeline stage, at the fullest moment of a step.

    Attributes:
      stage: number.
      parts: category -> bytes, every one of CATEGORIES.
    """

    stage: int
    parts: Mapping[str, float]

    @property
    def bytes(self) -> float:
        """Of all categories."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class StepMemory:
    """Of all stages; one without a pipeline."""

    stages: tuple[StageMemory, ...]

    @property
    def fullest(self) -> StageMemory:
        """The stage that needs most, the first of equals."""
        return max(self.stages, key=lambda stage: stage.bytes)

    @property
    def bytes(self) -> float:
        """Of a device of the fullest stage."""
        return self.fullest.bytes


def predict_memory(run: RunConfig, platform: str = "gpu") -> StepMemory:
    """What a run's step needs on its mesh, of which no device need exist.

    All stages of a pipeline run one program, in which every device has room for what any stage does: they need the same.

    Args:
      run: every mesh axis with its size.
      platform: `cpu`, `gpu` or `tpu`; it decides kernels, and on CPU 16-bit products are made of float32 copies.

    Raises:
      ValueError: sizes of the mesh that the model or the batch do not allow; `remat="auto"`, which is a choice still to be made.
    """
    layout = abstract_layout(run)
    check_batch_size(run.batch_size, run.parts, layout)
    moments = moment_layout(run, layout)
    shape = StepShape.of(run, layout, platform)
    sizes = LayerSizes.of(run, shape, layout, platform)
    kept = state_bytes(run, layout, moments)
    stages = layout.mesh.shape["pipeline"]
    found = (pipeline_moments if stages > 1 else step_moments)(run, sizes, layout, moments)
    fullest: Bytes = max(found, key=lambda moment: sum(moment.values()))
    both = {name: kept.get(name, 0.0) + fullest[name] for name in CATEGORIES}
    return StepMemory(tuple(StageMemory(stage, both) for stage in range(stages)))
