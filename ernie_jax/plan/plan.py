"""A plan: the way to train a model on a topology that was chosen, what else there was, and why it lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ernie_jax.config.model import ModelConfig
from ernie_jax.config.nearest import did_you_mean
from ernie_jax.config.optimization import OptimizerConfig
from ernie_jax.config.presets import PRESETS, preset
from ernie_jax.config.remat import Remat
from ernie_jax.plan.candidate import Candidate
from ernie_jax.plan.candidates import Task
from ernie_jax.plan.hlo import CollectiveUse, summed
from ernie_jax.plan.search import Found, search
from ernie_jax.plan.step_collectives import predict_collectives
from ernie_jax.plan.topologies import machine_named
from ernie_jax.plan.topology import GIB, Topology

OPTIMIZERS: dict[str, OptimizerConfig] = {"adamw": OptimizerConfig(), "adamw_ema": OptimizerConfig(ema_decay=0.999)}
# Rows of a step for each device where none are given: the published pre-training of 300B took 7.5 on its 2,016.
ROWS_A_DEVICE = 8
SEQ_LEN = 4096
_MOST_ALTERNATIVES = 8


@dataclass(frozen=True)
class Plan:
    """What a search found.

    Attributes:
      model: its name.
      topology: the machine.
      choice: the fastest candidate that fits, None where nothing does.
      alternatives: runners-up of other meshes, best first, then faster ones that do not fit; where nothing fits, nearest misses,
        least memory first.
      collectives: of a device of the middle stage of the choice (or the nearest miss), summed by kind, axis and format.
      considered: all candidates that were looked at closely.
      budget: bytes of a device that a step may take.
      ways: how many ways there are to spread the step; those not considered were estimated slower, or cannot hold its state.
      advice: where nothing fits, what would make it fit; "" otherwise.
      compiled: what compiling the choice showed, None until that is done.
    """

    model: str
    topology: Topology
    choice: Candidate | None
    alternatives: tuple[Candidate, ...]
    collectives: tuple[CollectiveUse, ...]
    considered: tuple[Candidate, ...]
    budget: float
    ways: int
    advice: str = ""
    compiled: Any = None

    @property
    def shown(self) -> Candidate:
        """The choice, or the nearest miss."""
        return self.choice or self.alternatives[0]

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data. `memory` is by category, in GiB of the fullest device; of each alternative the same scalars
        as of the choice, with the reason why it lost."""
        shown = self.shown
        found: dict[str, Any] = {
            "model": self.model,
            "topology": self.topology.name,
            "devices": self.topology.devices,
            **shown.scalars(),
            "batch_size": shown.run.batch_size,
            "seq_len": shown.run.seq_len,
            "dtype": shown.run.computed_in,
            "virtual_stages": shown.run.pipeline.virtual_stages,
            "memory_budget_gib": round(self.budget / GIB, 3),
            "memory": {name: round(size / GIB, 4) for name, size in shown.memory.fullest.parts.items()},
            "time": [{"name": part.name, "seconds": part.seconds, "kind": part.kind} for part in shown.time.parts],
            "collectives": [
                {"kind": use.kind, "axis": use.axis, "bytes": use.bytes, "count": use.count, "dtype": use.dtype}
                for use in self.collectives
            ],
            "alternatives": [other.scalars() for other in self.alternatives],
            "ways": self.ways,
            "considered": len(self.considered),
            "advice": self.advice,
        }
        if self.compiled is not None and hasattr(self.compiled, "to_json"):
            found["compiled"] = self.compiled.to_json()
        return found


def make_plan(
    model: str | ModelConfig,
    topology: str | Topology,
    *,
    global_tokens: int | None = None,
    seq_len: int | None = None,
    dtype: str = "bfloat16",
    optimizer: str | OptimizerConfig = "adamw",
    mesh: Mapping[str, int] | None = None,
    schedule: str | None = None,
    virtual_stages: int | None = None,
    microbatches: int | None = None,
    zero: int | None = None,
    remat: Remat | None = None,
    dispatch: str | None = None,
    capacity_factor: float | None = None,
    image_share: float = 0.5,
    memory_budget: float = 0.9,
    say: Callable[[str], None] = lambda line: None,
) -> Plan:
    """The fastest way to train a model on a topology within the memory of its devices; nothing is run or compiled.

    Args:
      model: a preset, or a shape.
      topology: a name of the catalogue ("h100:512"), the path of a YAML file, or a topology.
      global_tokens: tokens of a step on all devices, a multiple of `seq_len`; None for 8 rows a device.
      seq_len: tokens a row; None for 4,096, or what the model has positions for.
      dtype: "float32", "bfloat16", or "fp8" (in the experts).
      optimizer: "adamw", "adamw_ema" (which keeps a running average of the weights), or its settings.
      mesh: sizes of some axes of the mesh, or of all; the others are searched.
      schedule, virtual_stages, microbatches, zero, remat, dispatch: fixed where they are given.
      capacity_factor: bound on the load of an expert, see `config.moe`; None drops nothing.
      image_share: of a vision-language model's tokens.
      memory_budget: share of a device's memory that a step may take.
      say: is told what is done.

    Raises:
      ValueError: an unknown name, with the nearest known one; tokens that are no whole rows; a mesh that does not fit the devices
        or the model; numbers out of range.
    """
    name, shape = _model(model)
    machine = machine_named(topology)
    if not (isinstance(memory_budget, int | float) and 0 < memory_budget <= 1):
        raise ValueError(f"memory_budget={memory_budget!r}; expected a share of a device's memory, above 0 and at most 1")
    length = min(SEQ_LEN, shape.max_position_embeddings) if seq_len is None else seq_len
    task = Task(
        model=shape,
        batch_size=_rows(global_tokens, length, machine),
        seq_len=length,
        dtype=dtype,
        optimizer=_optimizer(optimizer),
        image_share=image_share,
        mesh=dict(mesh or {}),
        schedule=schedule,
        virtual_stages=virtual_stages,
        microbatches=microbatches,
        zero=zero,
        remat=remat,
        dispatch=dispatch,
        capacity_factor=capacity_factor,
    )
    machine.peak(dtype)
    budget = memory_budget * machine.memory_bytes
    found = search(task, machine, budget, say)
    return _plan(name, machine, found, budget, task)


def _plan(name: str, topology: Topology, found: Found, budget: float, task: Task) -> Plan:
    fitting = [candidate for candidate in found.considered if candidate.fits]
    choice = fitting[0] if fitting else None
    if choice is None:
        alternatives = _of_different_meshes(found.considered, set())
        advice = _advice(alternatives[0], topology, budget)
    else:
        seen = {tuple(choice.mesh.values())}
        alternatives = _of_different_meshes(fitting, seen)
        faster = [c for c in found.considered if not c.fits and c.time.seconds < choice.time.seconds]
        faster.sort(key=lambda c: c.time.seconds)
        alternatives += _of_different_meshes(faster, set())[:3]
        advice = ""
    shown = choice or alternatives[0]
    uses = summed(predict_collectives(shown.run, topology.platform, stage=shown.run.mesh.pipeline // 2))
    return Plan(name, topology, choice, tuple(alternatives), tuple(uses), found.considered, budget, found.ways, advice)


def _of_different_meshes(candidates: list[Candidate] | tuple[Candidate, ...], seen: set[tuple[int, ...]]) -> list[Candidate]:
    found = []
    for candidate in candidates:
        mesh = tuple(candidate.mesh.values())
        if mesh not in seen:
            seen.add(mesh)
            found.append(candidate)
    return found[:_MOST_ALTERNATIVES]


def _advice(nearest: Candidate, topology: Topology, budget: float) -> str:
    """What would make the nearest miss fit."""
    parts = nearest.memory.fullest.parts
    state = sum(parts.get(name, 0.0) for name in ("parameters", "optimizer", "gradients"))
    lines = [f"the nearest miss needs {nearest.memory_gib:.1f} GiB of {budget / GIB:.1f} a device"]
    mesh = nearest.run.mesh
    if state > budget:
        lines.append(f"{state / GIB:.1f} GiB of it are parameters, moments and gradients: take more devices")
        if mesh.zero == 0 and nearest.run.model.hidden_size % (mesh.data * mesh.expert):
            power = 1 << (topology.devices - 1).bit_length()
            lines.append(
                f"ZeRO needs a number of devices whose data and expert axes divide the width {nearest.run.model.hidden_size}: "
                f"{power // 2} or {power} instead of {topology.devices}"
            )
    else:
        lines.append("take more devices, shorter rows, or a capacity factor for the experts' buffers")
    return "; ".join(lines)


def _model(model: str | ModelConfig) -> tuple[str, ModelConfig]:
    if isinstance(model, ModelConfig):
        return next((name for name, known in PRESETS.items() if known == model), "custom"), model
    return model, preset(model)


def _optimizer(optimizer: str | OptimizerConfig) -> OptimizerConfig:
    if isinstance(optimizer, OptimizerConfig):
        return optimizer
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {optimizer!r}{did_you_mean(optimizer, OPTIMIZERS)}; there are {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[optimizer]


def _rows(global_tokens: int | None, seq_len: int, topology: Topology) -> int:
    for name, value in (("seq_len", seq_len), ("global_tokens", global_tokens)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}={value!r}; expected a positive whole number of tokens")
    if global_tokens is None:
        return ROWS_A_DEVICE * topology.devices
    rows, rest = divmod(global_tokens, seq_len)
    if rest:
        near = f"{rows * seq_len} or {(rows + 1) * seq_len}" if rows else f"{seq_len}"
        raise ValueError(f"global_tokens={global_tokens} are no whole rows of seq_len={seq_len} tokens; take {near}")
    return rows
