"""What a way to spread a step needs at least, in microseconds of arithmetic: the search looks closely only at what may win.

The bytes are a lower bound: parameters, moments and the gradients between passes. The seconds are an estimate: rooflines of the
layers, the exchange of experts, of activations and of weights at the speed of their links, and the bubble by its formula.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ernie_jax.plan.abstract_layout import abstract_layout
from ernie_jax.plan.candidates import Task, Way
from ernie_jax.plan.links import collective_seconds
from ernie_jax.plan.operations import (
    CPU_LAYER_FLOPS,
    CPU_MEETING_FLOPS,
    EXPERT_SKEW,
    UPDATE_BYTES,
    ShardSizes,
    StepWork,
    cpu_seconds,
    stage_loops,
)
from ernie_jax.plan.overlap import HIDDEN_WEIGHTS
from ernie_jax.plan.stage_time import formula_seconds
from ernie_jax.plan.topology import Topology
from ernie_jax.train.remat_prediction import StepShape

_FLOAT = 4
_OF_MOMENTS = 3 * _FLOAT  # two moments and a gradient


_Mesh = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class _Costs:
    """Seconds of a microbatch on a device: of all layers forward and backward, of the head, and the sizes they were taken for."""

    forward: float
    backward: float
    head: float
    tokens: int
    received: int


class Bounds:
    """Estimates for one task and topology; equal parts of them are worked out once."""

    def __init__(self, task: Task, topology: Topology) -> None:
        self.task, self.topology = task, topology
        kinds = task.model.layer_kinds
        self._layers = {kind: kinds.count(kind) for kind in set(kinds)}
        self._costs = functools.cache(self._costs_of)
        self._sizes = functools.cache(self._sizes_of)
        self._exposed = functools.cache(self._exposed_of)

    def bytes(self, way: Way) -> float:
        """At least so many bytes of a device: the state, and the gradients where they are summed."""
        sizes = self._sizes(_mesh(way), way.zero)
        return sizes.kept * _FLOAT + sizes.moments * _OF_MOMENTS

    def seconds(self, way: Way) -> float:
        """About so many seconds of a step, with nothing recomputed but what a pipeline must.

        Raises:
          ValueError: a way that no run could take.
        """
        topology, m, mesh = self.topology, way.microbatches, _mesh(way)
        costs = self._costs(mesh, m, way.dispatch)
        passes = costs.forward * (2 if way.pipeline > 1 else 1) + costs.backward
        once, looped, sends = self._exposed(mesh, m, way.dispatch, way.zero)
        work = [passes / way.pipeline + (looped + sends * way.virtual_stages) / m] * way.pipeline
        work[-1] += costs.head
        if topology.platform == "cpu":
            step = m * sum(work) / way.pipeline * (1 + stage_loops(way.run(self.task, "full"), topology.platform))
        else:
            step = formula_seconds(work, m, way.virtual_stages)
        sizes = self._sizes(mesh, way.zero)
        return step + once + sizes.moments * (UPDATE_BYTES + (12 * m if m > 1 else 0)) / topology.memory_bandwidth

    def _sizes_of(self, mesh: _Mesh, zero: int) -> ShardSizes:
        return ShardSizes.of(_way(mesh, zero, 1, "auto").run(self.task, "full"))

    def _costs_of(self, mesh: _Mesh, microbatches: int, dispatch: str) -> _Costs:
        way = _way(mesh, 0, microbatches, dispatch)
        run = way.run(self.task, "full")
        platform = self.topology.platform
        shape = StepShape.of(run, abstract_layout(run), platform)
        work = StepWork(run, shape, platform, 1.0 if platform == "cpu" else EXPERT_SKEW)
        start = cpu_seconds(self.topology, CPU_LAYER_FLOPS)
        forward = backward = 0.0
        for kind, count in self._layers.items():
            ops = work.layer(kind)
            forward += count * (start + sum(op.seconds(self.topology) for op in ops))
            backward += count * (start + sum(op.backward.seconds(self.topology) for op in ops))
        tower = work.tower()
        # The tower is spread over all devices, the layers over the stages.
        forward += way.pipeline * sum(op.seconds(self.topology) for op in tower)
        backward += way.pipeline * sum(op.backward.seconds(self.topology) for op in tower)
        head = sum(op.seconds(self.topology) for op in work.head())
        return _Costs(forward, backward, head, shape.tokens, shape.sent)

    def _exposed_of(self, mesh: _Mesh, microbatches: int, dispatch: str, zero: int) -> tuple[float, float, float]:
        """Exposed seconds of a device's collectives in a step: (once, in loops, of each chunk's sending to the next stage)."""
        task, m, sizes_of = self.task, microbatches, dict(mesh)
        costs, stages = self._costs(mesh, m, dispatch), sizes_of["pipeline"]
        cpu = self.topology.platform == "cpu"
        dim, width = task.model.hidden_size, _FLOAT if task.dtype == "float32" or cpu else 2
        again = 2 if stages > 1 else 1
        meeting = cpu_seconds(self.topology, CPU_MEETING_FLOPS)

        def time(kind: str, axes: tuple[str, ...], size: float) -> float:
            known = tuple(axis for axis in axes if sizes_of[axis] > 1)
            return meeting + collective_seconds(self.topology, sizes_of, kind, known, size) if known else 0.0

        looped = once = sends = 0.0
        stream, moe_layers = costs.tokens * dim * width, self._layers.get("moe", 0) / stages
        if sizes_of["expert"] > 1:
            kinds = ("all-gather", "reduce-scatter") if dispatch == "replicated" else ("all-to-all", "all-to-all")
            each = sum(time(kind, ("expert",), costs.received * dim * width) for kind in kinds)
            looped += m * moe_layers * (again + 1) * each
        if sizes_of["tensor"] > 1:
            each = 2 * sum(time(kind, ("tensor",), stream) for kind in ("all-gather", "reduce-scatter"))
            looped += m * sum(self._layers.values()) / stages * (again + 1) * each
        if stages > 1:
            sends = 2 * m * time("collective-permute", ("pipeline",), stream)
            once += 2 * time("all-gather", ("pipeline",), self._sizes(mesh, zero).kept * stages * width)
        # Most weights are the experts', which are split over `expert` already.
        axes = ("data",) if moe_layers else ("data", "expert")
        whole = self._sizes(mesh, 0).kept
        if zero == 3 and stages == 1:
            weights = 2 * time("all-gather", axes, whole * width) + time("reduce-scatter", axes, whole * _FLOAT)
            looped += (1 if cpu else 1 - HIDDEN_WEIGHTS) * m * weights
        else:
            once += time("all-reduce" if zero == 0 else "reduce-scatter", axes, whole * _FLOAT)
            once += time("all-gather", axes, whole * _FLOAT) if zero else 0.0
        return once, looped, sends


def _mesh(way: Way) -> _Mesh:
    return tuple(way.mesh.items())


def _way(mesh: _Mesh, zero: int, microbatches: int, dispatch: str) -> Way:
    return Way(**dict(mesh), zero=zero, microbatches=microbatches, schedule="1f1b", virtual_stages=1, dispatch=dispatch)
