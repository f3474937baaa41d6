"""One training run: everything `config.json` of a run's folder holds, as validated frozen dataclasses."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass, field
from typing import Any

from ernie_jax.config.bounds import at_least
from ernie_jax.config.compute import (
    ATTENTION,
    DTYPES,
    EXCHANGE_FIELDS,
    PRECISIONS,
    ComputeConfig,
    Fp8Config,
    one_of,
)
from ernie_jax.config.data import DataConfig
from ernie_jax.config.model import ModelConfig
from ernie_jax.config.moe_training import MoETrainConfig
from ernie_jax.config.optimization import OptimizerConfig, ScheduleConfig
from ernie_jax.config.pipeline import PipelineConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes (-1 once takes the devices that are left) and what ZeRO shards over data.

    `zero`: 0 nothing, 1 the optimiser state, 3 the parameters as well.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    zero: int = 0

    def __post_init__(self) -> None:
        if self.zero not in (0, 1, 3):
            raise ValueError(
                f"config.mesh.zero={self.zero}; expected 0 (nothing), 1 (optimiser state sharded) or 3 (parameters too)"
            )
        shown = ", ".join(f"{axis}={size}" for axis, size in self.sizes.items())
        for axis, size in self.sizes.items():
            if size < 1 and size != -1:
                raise ValueError(f"config.mesh.{axis}={size}; expected a positive size, or -1 for the devices left over ({shown})")
        if list(self.sizes.values()).count(-1) > 1:
            raise ValueError(f"config.mesh: {shown}; at most one axis may be -1 and take the devices left over")

    @property
    def rules(self) -> str:
        """Name of the sharding rules of the parameters."""
        return "fsdp" if self.zero == 3 else "tp_sp"

    @property
    def sizes(self) -> dict[str, int]:
        """Axis sizes as `make_mesh` takes them."""
        return {"data": self.data, "tensor": self.tensor, "pipeline": self.pipeline, "expert": self.expert}


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """How tokens and modalities count in the objective.

    Attributes:
      token_balanced: divide the cross-entropy by the constant number of places of a step instead of its scored tokens, so that
        documents with few labels (many image tokens) do not weigh more a label; what is reported stays the mean.
      text_weight, multimodal_weight: factors of the labels in documents of text alone, and with images or videos.
      vision_router_weight: factor of the vision experts' router losses beside those of the text experts.
      mtp_weight: factor of the mean loss of the blocks of multi-token prediction, where the model has them
        (`model.num_nextn_predict_layers`); 0 trains without them, and then neither the state nor the export has their weights.
    """

    token_balanced: bool = False
    text_weight: float = 1.0
    multimodal_weight: float = 1.0
    vision_router_weight: float = 1.0
    mtp_weight: float = 0.3

    def __post_init__(self) -> None:
        weights = ("text_weight", "multimodal_weight", "vision_router_weight", "mtp_weight")
        at_least("config.loss", 0.0, **{name: getattr(self, name) for name in weights})
        if not (self.text_weight or self.multimodal_weight):
            raise ValueError("config.loss: text_weight and multimodal_weight are both 0; one must be positive to train anything")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving: every `every` steps (0 only at the end), the last `keep` and each multiple of `keep_every` are kept."""

    every: int = 100
    keep: int = 3
    keep_every: int | None = None
    asynchronous: bool = True

    def __post_init__(self) -> None:
        at_least("config.checkpoint", 0, every=self.every)
        at_least("config.checkpoint", 1, keep=self.keep, keep_every=self.keep_every)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Held-out loss every `every` steps (0 only at the end) over at most `batches` batches."""

    every: int = 0
    batches: int = 8

    def __post_init__(self) -> None:
        at_least("config.eval", 0, every=self.every)
        at_least("config.eval", 1, batches=self.batches)


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """Greedy continuation of `prompt` every `every` steps (0 only at the end; an empty prompt never)."""

    every: int = 0
    prompt: str = ""
    max_new_tokens: int = 48

    def __post_init__(self) -> None:
        at_least("config.sample", 0, every=self.every)
        at_least("config.sample", 1, max_new_tokens=self.max_new_tokens)


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """A profiler trace of `steps` steps from step `start` (0 steps for none)."""

    start: int = 10
    steps: int = 0

    def __post_init__(self) -> None:
        at_least("config.profile", 0, start=self.start, steps=self.steps)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run. Batch sizes are global: `batch_size` rows of `seq_len` tokens an optimiser step, in `accumulate` parts.

    `trainable` lists patterns of parameter paths that are trained (`*` for anything, `!` takes away; see `trained_paths`): the
    rest has no gradient and no optimiser state. `init_from` names a Hugging Face checkpoint folder whose weights the run starts
    with, such as the export of the stage before; None starts from random ones. `precision`, where it is set, takes the place
    of `dtype`: `float32`, `bfloat16`, or `fp8`, which multiplies in FP8 in the experts and computes in bfloat16 elsewhere.

    `remat` says what the backward pass computes again (see ComputeConfig and config/remat.py). `auto` compiles the step under one
    policy after another and takes the cheapest that fits `remat_budget` of a device's memory: what the device says it has, or
    `device_memory_bytes` where that is set. When the fullest device's share of the experts' load is above the mean by more than
    `remat_on_imbalance` and the step would not fit that budget, experts are recomputed from then on; None never.
    """

    model: ModelConfig
    steps: int
    batch_size: int
    seq_len: int
    accumulate: int = 1
    log_every: int = 10
    dtype: str = "float32"
    precision: str | None = None
    seed: int = 0
    remat: str | tuple[str, ...] = "none"
    remat_budget: float = 0.85
    device_memory_bytes: int | None = None
    remat_on_imbalance: float | None = 0.15
    attention: str = "auto"
    loss_chunk: int = 1024
    trainable: tuple[str, ...] = ("*",)
    init_from: str | None = None
    mesh: MeshConfig = field(default_factory=MeshConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    fp8: Fp8Config = field(default_factory=Fp8Config)
    moe: MoETrainConfig = field(default_factory=MoETrainConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    data: DataConfig
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    def __post_init__(self) -> None:
        counts = ("steps", "batch_size", "seq_len", "accumulate", "log_every")
        at_least("config", 1, **{name: getattr(self, name) for name in counts})
        one_of("config", "dtype", self.dtype, DTYPES)
        one_of("config", "attention", self.attention, ATTENTION)
        at_least("config", 0.0, remat_on_imbalance=self.remat_on_imbalance)
        at_least("config", 1, device_memory_bytes=self.device_memory_bytes)
        if not 0 < self.remat_budget <= 1:
            raise ValueError(f"config.remat_budget={self.remat_budget}; expected a share of a device's memory, in (0, 1]")
        if self.precision is not None:
            one_of("config", "precision", self.precision, PRECISIONS)
        if self.precision == "fp8" and self.model.moe is None:
            raise ValueError(
                "config.precision='fp8' multiplies in FP8 in the experts, and this model has none; use 'bfloat16' for a dense model"
            )
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"config.batch_size={self.batch_size} cannot be split into config.accumulate={self.accumulate} equal parts "
                f"(remainder {self.batch_size % self.accumulate}); choose a batch size that is a multiple of {self.accumulate}"
            )
        if self.mesh.pipeline == -1 and self.pipeline.microbatches is None:
            raise ValueError(
                "config.mesh.pipeline=-1 leaves the number of stages to the devices found; name config.pipeline.microbatches"
            )
        if self.batch_size % self.parts:
            raise ValueError(
                f"config.batch_size={self.batch_size} cannot be split into {self.parts} equal parts (config.accumulate="
                f"{self.accumulate} x config.pipeline.microbatches={self.microbatches}); choose a multiple of {self.parts}"
            )
        if self.seq_len > self.model.max_position_embeddings:
            raise ValueError(
                f"config.seq_len={self.seq_len} is beyond the model's max_position_embeddings={self.model.max_position_embeddings}"
            )
        schedule = self.schedule
        if schedule.warmup > self.steps:
            # Not an error: a few steps of a long recipe are how one tries it.
            logger.warning(
                "config.schedule.warmup=%d is longer than config.steps=%d: the learning rate never reaches its peak",
                schedule.warmup,
                self.steps,
            )
        end = schedule.steady_end
        if schedule.kind == "wsd" and end is not None and not schedule.warmup <= end <= self.steps:
            raise ValueError(
                f"config.schedule.steady_end={end}; expected a step from the end of warm-up, {schedule.warmup}, to the last step, "
                f"{self.steps}; beyond it the learning rate would never decay (None begins the decay at 0.9 of all steps)"
            )
        moe = self.model.moe
        if moe is not None and moe.num_experts % self.moe.orthogonal_groups:
            raise ValueError(
                f"config.moe.orthogonal_groups={self.moe.orthogonal_groups} does not divide the {moe.num_experts} experts"
            )
        if self.moe.placement_every and moe is None:
            raise ValueError(f"config.moe.placement_every={self.moe.placement_every}, but the model has no experts; set it to 0")
        nodes, shards = self.moe.expert_nodes, self.mesh.expert
        if nodes is not None and shards != -1 and shards % nodes:
            raise ValueError(
                f"config.moe.expert_nodes={nodes} does not divide config.mesh.expert={shards}; each node needs as many of the "
                "expert axis's devices"
            )
        self._check_compression()
        if self.mtp_blocks and self.model.vision is not None:
            raise ValueError(
                f"config.model.num_nextn_predict_layers={self.model.num_nextn_predict_layers} of a vision-language model; multi-"
                "token prediction is of text models alone: set it to 0, or config.loss.mtp_weight to 0"
            )
        # Raises now, before any work, on what only ComputeConfig checks.
        _ = self.compute

    def _check_compression(self) -> None:
        if self.optimizer.gradient_compression == "none":
            return
        # A stage adds up its own layers' gradients; ZeRO 3 has split them over the data axis before they can be rounded.
        wrong = [f"config.mesh.pipeline={self.mesh.pipeline}"] if self.mesh.pipeline != 1 else []
        wrong += ["config.mesh.zero=3"] if self.mesh.zero == 3 else []
        wrong += ["a vision-language model"] if self.model.vision is not None else []
        if wrong:
            raise ValueError(
                f"config.optimizer.gradient_compression={self.optimizer.gradient_compression!r} is for text models on a mesh of "
                f"data, expert and tensor axes, with zero 0 or 1; here there is {', '.join(wrong)}. Change that, or set 'none'"
            )

    @property
    def microbatches(self) -> int:
        """Parts that pass through the pipeline's stages together."""
        return self.pipeline.microbatches or self.mesh.pipeline

    @property
    def parts(self) -> int:
        """Parts of a step in all, whose gradients are added up."""
        return self.accumulate * self.microbatches

    @property
    def computed_in(self) -> str:
        """`precision`, or `dtype` where that is not set."""
        return self.precision or self.dtype

    @property
    def mtp_blocks(self) -> int:
        """Blocks of multi-token prediction that the run trains."""
        return self.model.num_nextn_predict_layers if self.loss.mtp_weight > 0 else 0

    @property
    def compute(self) -> ComputeConfig:
        """How the model is run in training; parameters are stored in float32, the master copy."""
        fp8 = self.computed_in == "fp8"
        return ComputeConfig(
            dtype="bfloat16" if fp8 else self.computed_in,
            fp8=self.fp8 if fp8 else None,
            remat=self.remat,
            attention=self.attention,
            loss_chunk=self.loss_chunk,
            **{name: getattr(self.moe, name) for name in EXCHANGE_FIELDS},
            grouped_matmul=self.moe.grouped_matmul,
            capacity_factor=self.moe.capacity_factor,
            router_temperature=self.moe.router_temperature,
            movable_experts=self.moe.placement_every > 0,
            mtp=self.mtp_blocks > 0,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dictionaries, as written to `config.json`."""
        return dataclasses.asdict(self)
