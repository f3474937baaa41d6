"""The ways to spread a training step over a topology: meshes, schedules, microbatches, ZeRO, dispatchers.

A way is made into the RunConfig of a real run, which checks it as training would. What no run could do is left out before:
sizes of the model that axes do not divide, rows that microbatches and devices do not split, a tensor axis across nodes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ernie_jax.config.compute import DISPATCH, PRECISIONS, one_of
from ernie_jax.config.data import DataConfig
from ernie_jax.config.model import ModelConfig
from ernie_jax.config.nearest import did_you_mean
from ernie_jax.config.optimization import OptimizerConfig
from ernie_jax.config.pipeline import PIPELINE_SCHEDULES, PipelineConfig
from ernie_jax.config.remat import Remat, remat_plan
from ernie_jax.config.run import MeshConfig, MoETrainConfig, RunConfig
from ernie_jax.config.segments import segments_of
from ernie_jax.plan.topology import Topology
from ernie_jax.sharding.mesh import MESH_AXES

# Rows of a microbatch on a device that are tried: powers of two up to this, and all rows at once.
MOST_ROWS = 16
MOST_VIRTUAL_STAGES = 4
ZERO = (0, 1, 3)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be trained, and what of its parallel plan is given.

    Attributes:
      model: its shape.
      batch_size, seq_len: rows and tokens a row of a step.
      dtype: "float32", "bfloat16" or "fp8".
      optimizer: of the run.
      image_share: of a vision-language model's tokens.
      mesh: sizes of some axes.
      schedule, virtual_stages, microbatches, zero, remat, dispatch: what is given of them; None is free.
      capacity_factor: see `config.moe`.
    """

    model: ModelConfig
    batch_size: int
    seq_len: int
    dtype: str = "bfloat16"
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    image_share: float = 0.5
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
    schedule: str | None = None
    virtual_stages: int | None = None
    microbatches: int | None = None
    zero: int | None = None
    remat: Remat | None = None
    dispatch: str | None = None
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        one_of("plan", "dtype", self.dtype, PRECISIONS)
        for name, allowed in (("schedule", PIPELINE_SCHEDULES), ("dispatch", DISPATCH)):
            if (value := getattr(self, name)) is not None:
                one_of("plan", name, value, allowed)
        if self.zero is not None and self.zero not in ZERO:
            raise ValueError(f"plan.zero={self.zero!r}; expected 0 (nothing), 1 (optimiser state sharded) or 3 (parameters too)")
        for name in ("batch_size", "seq_len", "microbatches", "virtual_stages"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"plan.{name}={value!r}; expected a positive whole number")
        if self.remat == "auto":
            raise ValueError("plan.remat='auto'; leave it out, and the policy that computes least of those that fit is taken")
        if self.remat is not None:
            remat_plan(self.remat)
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            raise ValueError(f"plan.capacity_factor={self.capacity_factor!r}; expected a positive number, or None for no limit")
        if not 0 <= self.image_share < 1:
            raise ValueError(f"plan.image_share={self.image_share!r}; expected a share from 0 to below 1")
        for axis, size in self.mesh.items():
            if axis not in MESH_AXES:
                near = did_you_mean(axis, MESH_AXES)
                raise ValueError(f"mesh axis {axis!r} is not known{near}; there are {', '.join(MESH_AXES)}")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"mesh axis {axis}={size!r}; expected a positive whole number")
        if self.seq_len > self.model.max_position_embeddings:
            raise ValueError(
                f"seq_len={self.seq_len} is beyond the model's max_position_embeddings={self.model.max_position_embeddings}; "
                "give fewer tokens a row"
            )


@dataclass(frozen=True)
class Way:
    """One way to spread a task; `remat` is chosen later, by what fits."""

    pipeline: int
    data: int
    expert: int
    tensor: int
    zero: int
    microbatches: int
    schedule: str
    virtual_stages: int
    dispatch: str

    @property
    def mesh(self) -> dict[str, int]:
        """Sizes by axis, in the order of the mesh."""
        return {axis: getattr(self, axis) for axis in MESH_AXES}

    def run(self, task: Task, remat: Remat) -> RunConfig:
        """The run.

        Raises:
          ValueError: what no run could do.
        """
        staged = self.pipeline > 1
        return RunConfig(
            model=task.model,
            steps=1,
            batch_size=task.batch_size,
            seq_len=task.seq_len,
            accumulate=1 if staged else self.microbatches,
            precision=task.dtype,
            dtype="float32" if task.dtype == "float32" else "bfloat16",
            remat=remat,
            mesh=MeshConfig(**self.mesh, zero=self.zero),
            pipeline=PipelineConfig(
                schedule=self.schedule,
                microbatches=self.microbatches if staged else None,
                virtual_stages=self.virtual_stages,
            ),
            # Frequencies of the balance loss of each microbatch, as the published recipes: no second forward pass.
            moe=MoETrainConfig(dispatch=self.dispatch, balance_scope="microbatch", capacity_factor=task.capacity_factor),
            optimizer=task.optimizer,
            data=DataConfig(kind="standard_library", max_patches=self._patches(task)),
        )

    def _patches(self, task: Task) -> int | None:
        """Patches of a device that make `image_share` of a microbatch's tokens, whole merged squares of them."""
        vision = task.model.vision
        if vision is None:
            return None
        square = vision.spatial_merge_size**2
        tokens = task.batch_size // self.microbatches * task.seq_len // (self.data * self.expert)
        return max(1, round(tokens * task.image_share / (self.pipeline * self.tensor))) * square


def ways(task: Task, topology: Topology) -> Iterator[Way]:
    """All ways that are not impossible."""
    for mesh in meshes(task, topology):
        rows = task.batch_size // (mesh["data"] * mesh["expert"])
        for zero in _zeros(task, mesh):
            for count in _microbatches(task, rows):
                for schedule, virtual in _schedules(task, mesh["pipeline"], count, topology):
                    for dispatch in _dispatchers(task, mesh["expert"]):
                        yield Way(
                            **mesh, zero=zero, microbatches=count, schedule=schedule, virtual_stages=virtual, dispatch=dispatch
                        )


def meshes(task: Task, topology: Topology) -> Iterator[dict[str, int]]:
    """Sizes of all axes that fill the topology and that the model and the batch can be split over.

    Raises:
      ValueError: given axes whose product does not divide the devices.
    """
    model, devices = task.model, topology.devices
    fixed = math.prod(task.mesh.values())
    if devices % fixed or (len(task.mesh) == len(MESH_AXES) and fixed != devices):
        shown = ", ".join(f"{axis}={size}" for axis, size in task.mesh.items())
        raise ValueError(
            f"mesh ({shown}) makes groups of {fixed} devices, which do not fill the {devices} of {topology.name}; choose sizes "
            f"whose product {'is' if len(task.mesh) == len(MESH_AXES) else 'divides'} {devices}"
        )
    experts = model.moe.num_experts if model.moe is not None and model.num_moe_layers else 1
    repeats = max(s.repeats for s in segments_of(model))
    for tensor in _sizes(task, "tensor", min(devices, topology.devices_per_node)):
        if not _splits_heads(model, task.seq_len, tensor):
            continue
        for pipeline in _sizes(task, "pipeline", repeats):
            # Stages that do not divide the width keep all layers: only where they are asked for.
            if model.hidden_size % pipeline and "pipeline" not in task.mesh:
                continue
            for expert in _sizes(task, "expert", experts):
                data, rest = divmod(devices, tensor * pipeline * expert)
                if rest or experts % expert or not data or task.mesh.get("data", data) != data:
                    continue
                if task.batch_size % (data * expert) == 0:
                    yield {"pipeline": pipeline, "data": data, "expert": expert, "tensor": tensor}


def _sizes(task: Task, axis: str, most: int) -> Sequence[int]:
    return (task.mesh[axis],) if axis in task.mesh else range(1, most + 1)


def _splits_heads(model: ModelConfig, seq_len: int, tensor: int) -> bool:
    """Whether a tensor axis divides all that it splits; fewer kv heads are held whole."""
    moe, kv = model.moe, model.num_key_value_heads
    sizes = [model.num_attention_heads, model.intermediate_size, model.vocab_size, seq_len]
    if moe is not None:
        sizes += [moe.intermediate_size, moe.shared_intermediate_size, moe.vision_intermediate_size or 0]
    return not any(size % tensor for size in sizes) and (kv % tensor == 0 or tensor % kv == 0)


def _zeros(task: Task, mesh: Mapping[str, int]) -> Iterator[int]:
    model, batch = task.model, mesh["data"] * mesh["expert"]
    widths = [model.hidden_size // (mesh["pipeline"] if model.hidden_size % mesh["pipeline"] == 0 else 1)]
    widths += [model.vision.hidden_size] if model.vision is not None else []
    for zero in ZERO if task.zero is None else (task.zero,):
        # With one data shard there is nothing to split.
        if zero == 0 or (not any(width % batch for width in widths) and (batch > 1 or task.zero is not None)):
            yield zero


def _microbatches(task: Task, rows: int) -> Iterator[int]:
    """Microbatches of a step, fewest rows of a device in each first."""
    if task.microbatches is not None:
        if rows % task.microbatches == 0:
            yield task.microbatches
        return
    each = 1
    while each <= min(rows, MOST_ROWS):
        if rows % each == 0:
            yield rows // each
        each *= 2
    if rows > MOST_ROWS or rows & (rows - 1):
        yield 1


def _schedules(task: Task, stages: int, microbatches: int, topology: Topology) -> Iterator[tuple[str, int]]:
    if stages == 1:
        if task.schedule is None or task.schedule == "1f1b":
            yield "1f1b", 1
        return
    repeats = max(s.repeats for s in segments_of(task.model))
    # gpipe is no faster than 1f1b, and with more microbatches than these it keeps more.
    few = microbatches <= 2 * stages - 1
    for schedule in PIPELINE_SCHEDULES if task.schedule is None else (task.schedule,):
        if schedule == "interleaved":
            counts = range(2, MOST_VIRTUAL_STAGES + 1) if task.virtual_stages is None else (task.virtual_stages,)
            yield from ((schedule, v) for v in counts if v > 1 and stages * v <= repeats)
        elif task.virtual_stages in (None, 1) and (schedule != "gpipe" or few or task.schedule or topology.platform == "cpu"):
            yield schedule, 1


def _dispatchers(task: Task, expert: int) -> Sequence[str]:
    if task.dispatch is not None:
        return (task.dispatch,)
    return ("auto",) if expert == 1 else ("all_to_all", "replicated")
