"""The search for the fastest way that fits: cheap estimates of all ways first, then a close look at the most promising.

1. Ways whose parameters, moments and gradients alone are beyond the budget are put aside.
2. The others are sorted by estimated time (`plan.bounds`), and looked at in that order: the cheapest remat policy that fits by
   `plan.memory`, its collectives, its time. Each mesh gets its turn before any gets its second.
3. It ends when what is left is estimated to be much slower than the best found, or after `most` ways.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ernie_jax.config.remat import Remat
from ernie_jax.config.run import RunConfig
from ernie_jax.plan.abstract_layout import abstract_layout
from ernie_jax.plan.bounds import Bounds
from ernie_jax.plan.candidate import Candidate, why_slower, why_too_large
from ernie_jax.plan.candidates import Task, Way, ways
from ernie_jax.plan.memory import predict_memory
from ernie_jax.plan.step_collectives import predict_collectives
from ernie_jax.plan.step_time import predict_time
from ernie_jax.plan.topology import Topology
from ernie_jax.sharding import Layout
from ernie_jax.train.remat_choice import candidates as remat_candidates
from ernie_jax.train.remat_prediction import StepShape, extra_flops

# Estimates leave recomputation out and are rough otherwise: what is estimated beyond this is not looked at.
SLACK = 1.6
MOST_LOOKED_AT = 160
Say = Callable[[str], None]


@dataclass(frozen=True)
class Found:
    """What a search saw.

    Attributes:
      considered: candidates that were looked at closely, the fitting ones first, each by time.
      ways: how many there are in all.
      too_large: how many of them cannot hold the state alone.
    """

    considered: tuple[Candidate, ...]
    ways: int
    too_large: int


def search(task: Task, topology: Topology, budget: float, say: Say = lambda line: None, *, most: int = MOST_LOOKED_AT) -> Found:
    """The candidates for a task on a topology, best first.

    Args:
      task: what is trained, and what of the plan is given.
      topology: the machine.
      budget: bytes of a device that a step may take.
      say: is told what is done.
      most: ways to look at closely.

    Raises:
      ValueError: nothing divides the model, the batch and the devices.
    """
    bounds = Bounds(task, topology)
    everything = list(ways(task, topology))
    if not everything:
        raise ValueError(_nothing(task, topology))
    small = [way for way in everything if bounds.bytes(way) <= budget]
    say(f"{len(everything):,} ways to spread the step, {len(small):,} of which can hold its state")
    looked: list[Candidate] = []
    if small:
        timed = sorted(((bounds.seconds(way), i) for i, way in enumerate(small)))
        looked = _look(task, topology, budget, [(seconds, small[i]) for seconds, i in timed], most)
    if not any(candidate.fits for candidate in looked):
        say("nothing fits; looking for what needs least")
        looked += _smallest(task, topology, budget, bounds, everything)
    if not looked:
        _ = _run(task, everything[0])  # raises what every way raises
    looked.sort(key=lambda c: (not c.fits, c.time.seconds if c.fits else c.memory.bytes))
    return Found(_with_reasons(looked, budget), len(everything), len(everything) - len(small))


def look(task: Task, topology: Topology, budget: float, way: Way) -> Candidate | None:
    """A way with the fastest remat policy that fits, or, where none does, with that of the least memory; None if no run could."""
    runs = _runs(task, topology, way)
    if not runs:
        return None
    # The least first: where it does not fit, none does.
    memory = predict_memory(runs[-1], topology.platform)
    run, fits = runs[-1], memory.bytes <= budget
    if fits:
        for other in runs[:-1]:
            needed = predict_memory(other, topology.platform)
            if needed.bytes <= budget:
                run, memory = other, needed
                break
    # A stage in the middle is like most of them.
    uses = predict_collectives(run, topology.platform, stage=run.mesh.pipeline // 2)
    time = predict_time(run, topology, uses)
    return Candidate(run, memory, time, fits)


def _runs(task: Task, topology: Topology, way: Way) -> list[RunConfig]:
    """The run under each policy, those that compute least first; empty where a real run would be refused."""
    policies: Sequence[Remat] = remat_candidates(task.model) if task.remat is None else [task.remat]
    try:
        run, layout = _run(task, way)
    except ValueError:
        return []
    shape = StepShape.of(run, layout, topology.platform)
    sorted_policies = sorted(policies, key=lambda policy: extra_flops(run, shape, policy))
    return [dataclasses.replace(run, remat=policy) for policy in sorted_policies]


def _run(task: Task, way: Way) -> tuple[RunConfig, Layout]:
    run = way.run(task, task.remat or "full")
    return run, abstract_layout(run)


def _look(task: Task, topology: Topology, budget: float, timed: list[tuple[float, Way]], most: int) -> list[Candidate]:
    """Close looks in rounds: the best estimated way of every mesh, then the second best, and so on."""
    turns: dict[tuple[int, ...], int] = {}
    order = []
    for seconds, way in timed:
        mesh = tuple(way.mesh.values())
        turns[mesh] = turns.get(mesh, -1) + 1
        order.append((turns[mesh], seconds, way))
    # A mesh that is estimated slower by a tenth waits a round.
    fastest = timed[0][0]
    order.sort(key=lambda item: item[0] + 10 * (item[1] / fastest - 1))
    best, found = float("inf"), []
    for _, seconds, way in order[: 4 * most]:
        if seconds > SLACK * best:
            continue
        candidate = look(task, topology, budget, way)
        if candidate is None:
            continue
        found.append(candidate)
        if candidate.fits:
            best = min(best, candidate.time.seconds)
        if len(found) >= most:
            break
    return found


def _smallest(task: Task, topology: Topology, budget: float, bounds: Bounds, everything: Iterable[Way]) -> list[Candidate]:
    """The way of each mesh whose state and rows are fewest, least first."""
    least: dict[tuple[int, ...], tuple[float, float, Way]] = {}
    for way in everything:
        key, size = tuple(way.mesh.values()), (bounds.bytes(way), -way.microbatches, way)
        if key not in least or size[:2] < least[key][:2]:
            least[key] = size
    nearest = sorted(least.values(), key=lambda item: item[:2])[:16]
    looked = (look(task, topology, budget, way) for _, _, way in nearest)
    return [candidate for candidate in looked if candidate is not None]


def _with_reasons(candidates: Sequence[Candidate], budget: float) -> tuple[Candidate, ...]:
    found = []
    for candidate in candidates:
        if not candidate.fits:
            reason = why_too_large(candidate, budget)
        else:
            reason = "" if candidate is candidates[0] else why_slower(candidate, candidates[0])
        found.append(dataclasses.replace(candidate, reason=reason))
    return tuple(found)


def _nothing(task: Task, topology: Topology) -> str:
    given: dict[str, object] = dict(task.mesh)
    given |= {
        name: value
        for name in ("schedule", "virtual_stages", "microbatches", "zero", "dispatch")
        if (value := getattr(task, name)) is not None
    }
    shown = ", ".join(f"{name}={value}" for name, value in given.items()) or "nothing fixed"
    return (
        f"no mesh of {topology.devices} devices divides the model and {task.batch_size} rows of {task.seq_len} tokens ({shown}); "
        "choose a batch with more factors of the device count, or fix less"
    )
