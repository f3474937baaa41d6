"""A way to run a task with what it needs, how long it takes, and why it was not chosen."""

from __future__ import annotations

from dataclasses import dataclass

from ernie_jax.config.run import RunConfig
from ernie_jax.plan.memory import StepMemory
from ernie_jax.plan.step_time import StepTime
from ernie_jax.plan.topology import GIB
from ernie_jax.sharding.mesh import MESH_AXES
from ernie_jax.train.remat_choice import policy_name


@dataclass(frozen=True)
class Candidate:
    """A run with its predictions.

    Attributes:
      run: the whole configuration of the step.
      memory, time: as predicted.
      fits: whether the fullest device stays within the budget.
      reason: why it lost, "" of the choice.
    """

    run: RunConfig
    memory: StepMemory
    time: StepTime
    fits: bool
    reason: str = ""

    @property
    def mesh(self) -> dict[str, int]:
        """Sizes by axis, in the order of the mesh."""
        return {axis: self.run.mesh.sizes[axis] for axis in MESH_AXES}

    @property
    def schedule(self) -> str | None:
        """Of the pipeline; "interleaved x2" for two virtual stages. None without stages."""
        if self.run.mesh.pipeline == 1:
            return None
        virtual = self.run.pipeline.virtual_stages
        return self.run.pipeline.schedule + (f" x{virtual}" if virtual > 1 else "")

    @property
    def remat(self) -> str:
        """The policy by name."""
        return policy_name(self.run.remat)

    @property
    def memory_gib(self) -> float:
        """Of the fullest device."""
        return self.memory.bytes / GIB

    def scalars(self) -> dict[str, object]:
        """What a list of candidates shows of it."""
        return {
            "mesh": self.mesh,
            "schedule": self.schedule,
            "remat": self.remat,
            "zero": self.run.mesh.zero,
            "microbatches": self.run.parts,
            "dispatch": self.run.moe.dispatch,
            "fits": self.fits,
            "memory_gib": round(self.memory_gib, 3),
            "step_time_s": self.time.seconds,
            "tokens_per_s": self.time.tokens_per_s,
            "mfu": self.time.mfu,
            "bubble_share": self.time.bubble / self.time.seconds,
            "exposed_share": self.time.exposed_share,
            "reason": self.reason,
        }


def mesh_text(candidate: Candidate) -> str:
    """Axes above 1: "pipeline 8 x data 8 x expert 8"."""
    return " x ".join(f"{axis} {size}" for axis, size in candidate.mesh.items() if size > 1) or "one device"


def why_slower(candidate: Candidate, choice: Candidate) -> str:
    """How much longer a candidate takes than the choice, and the part of the step that grew most."""
    mine, best = candidate.time, choice.time
    slower = mine.seconds / best.seconds - 1
    if slower < 0.0005:
        return f"as fast, {candidate.memory_gib:.0f} GiB instead of {choice.memory_gib:.0f}"
    theirs = {part.name: part.seconds for part in best.parts if part.kind != "hidden"}
    grown = {p.name: p.seconds - theirs.get(p.name, 0.0) for p in mine.parts if p.kind != "hidden"}
    name = max(grown, key=lambda key: grown[key])
    share = next(p.seconds for p in mine.parts if p.name == name and p.kind != "hidden") / mine.seconds
    return f"{slower:.1%} slower: {name} takes {share:.0%} of the step ({theirs.get(name, 0.0) / best.seconds:.0%} of the choice's)"


def why_too_large(candidate: Candidate, budget: float) -> str:
    """What a candidate needs of what there is, and the category that is most of it."""
    fullest = candidate.memory.fullest
    name = max(fullest.parts, key=lambda key: fullest.parts[key])
    return f"needs {candidate.memory_gib:.0f} GiB of {budget / GIB:.0f}, {fullest.parts[name] / GIB:.0f} of them {name}"
