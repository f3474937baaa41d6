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
from ernie_jax.plan.operations import EXPERT_SKEW, UPDATE_BYTES, ShardSizes, StepWork
from ernie_jax.plan.overlap import CPU_MEETING, HIDDEN_WEIGHTS
from ernie_jax.plan.stage_time import formula_seconds
from ernie_jax.plan.step_time import CPU_OPERATION
from ernie_jax.plan.topology import Topology
from ernie_jax.train.remat_prediction import StepShape

_FLOAT = 4
_OF_MOMENTS = 3 * _FLOAT  # two moments and a gradient


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
        self._costs = functools.lru_cache(maxsize=None)(self._costs_of)
        self._sizes = functools.lru_cache(maxsize=None)(self._sizes_of)

    def bytes(self, way: Way) -> float:
        """At least so many bytes of a device: the state, and the gradients where they are summed."""
        sizes = self._sizes(tuple(way.mesh.items()), way.zero)
        return sizes.kept * _FLOAT + sizes.moments * _OF_MOMENTS

    def seconds(self, way: Way) -> float:
        """About so many seconds of a step, with nothing recomputed but what a pipeline must.

        Raises:
          ValueError: a way that no run could take.
        """
        topology, m = self.topology, way.microbatches
        costs = self._costs(tuple(way.mesh.items()), m, way.dispatch)
        passes = costs.forward * (2 if way.pipeline > 1 else 1) + costs.backward
        once, looped = self._communication(way, costs)
        work = [passes / way.pipeline + looped / m] * way.pipeline
        work[-1] += costs.head
        if topology.platform == "cpu":
            step = m * sum(work) / way.pipeline
        else:
            step = formula_seconds(work, m, way.virtual_stages)
        sizes = self._sizes(tuple(way.mesh.items()), way.zero)
        return step + once + sizes.moments * (UPDATE_BYTES + (12 * m if m > 1 else 0)) / topology.memory_bandwidth

    def _sizes_of(self, mesh: tuple[tuple[str, int], ...], zero: int) -> ShardSizes:
        way = Way(**dict(mesh), zero=zero, microbatches=1, schedule="1f1b", virtual_stages=1, dispatch="auto")
        return ShardSizes.of(way.run(self.task, "full"))

    def _costs_of(self, mesh: tuple[tuple[str, int], ...], microbatches: int, dispatch: str) -> _Costs:
        way = Way(**dict(mesh), zero=0, microbatches=microbatches, schedule="1f1b", virtual_stages=1, dispatch=dispatch)
        run = way.run(self.task, "full")
        platform = self.topology.platform
        shape = StepShape.of(run, abstract_layout(run), platform)
        work = StepWork(run, shape, platform, 1.0 if platform == "cpu" else EXPERT_SKEW)
        start = CPU_OPERATION if platform == "cpu" else 0.0
        forward = backward = 0.0
        for kind in set(run.model.layer_kinds):
            count, ops = run.model.layer_kinds.count(kind), work.layer(kind)
            forward += count * (start + sum(op.seconds(self.topology) for op in ops))
            backward += count * (start + sum(op.backward.seconds(self.topology) for op in ops))
        tower = work.tower()
        # The tower is spread over all devices, the layers over the stages.
        forward += way.pipeline * sum(op.seconds(self.topology) for op in tower)
        backward += way.pipeline * sum(op.backward.seconds(self.topology) for op in tower)
        head = sum(op.seconds(self.topology) for op in work.head())
        return _Costs(forward, backward, head, shape.tokens, shape.sent)

    def _communication(self, way: Way, costs: _Costs) -> tuple[float, float]:
        """(exposed seconds once a step, exposed seconds in loops) of a device."""
        task, model, m = self.task, self.task.model, way.microbatches
        dim, width = model.hidden_size, _FLOAT if task.dtype == "float32" or self.topology.platform == "cpu" else 2
        again = 2 if way.pipeline > 1 else 1
        meet = CPU_MEETING if self.topology.platform == "cpu" else 0.0

        def time(kind: str, axes: tuple[str, ...], size: float) -> float:
            known = tuple(axis for axis in axes if way.mesh[axis] > 1)
            return meet + collective_seconds(self.topology, way.mesh, kind, known, size) if known else 0.0

        looped = once = 0.0
        layers, moe_layers = model.num_hidden_layers / way.pipeline, model.num_moe_layers / way.pipeline
        if way.expert > 1:
            rows = costs.received * dim * width
            kinds = ("all-gather", "reduce-scatter") if way.dispatch == "replicated" else ("all-to-all", "all-to-all")
            each = sum(time(kind, ("expert",), rows) for kind in kinds)
            looped += m * moe_layers * (again + 1) * each
        if way.tensor > 1:
            each = 2 * sum(time(kind, ("tensor",), costs.tokens * dim * width) for kind in ("all-gather", "reduce-scatter"))
            looped += m * layers * (again + 1) * each
        if way.pipeline > 1:
            looped += 2 * m * way.virtual_stages * time("collective-permute", ("pipeline",), costs.tokens * dim * width)
        sizes = self._sizes(tuple(way.mesh.items()), way.zero)
        # Most weights are the experts', which are split over `expert` already.
        axes = ("data",) if model.num_moe_layers else ("data", "expert")
        batch = tuple(axis for axis in axes if way.mesh[axis] > 1)
        if batch:
            whole = self._sizes(tuple(way.mesh.items()), 0).kept
            if way.zero == 3 and way.pipeline == 1:
                weights = 2 * time("all-gather", batch, whole * width) + time("reduce-scatter", batch, whole * _FLOAT)
                looped += (1 - (HIDDEN_WEIGHTS if not meet else 0)) * m * weights
            else:
                once += time("all-reduce" if way.zero == 0 else "reduce-scatter", batch, whole * _FLOAT)
                once += time("all-gather", batch, whole * _FLOAT) if way.zero else 0.0
        if way.pipeline > 1:
            once += 2 * time("all-gather", ("pipeline",), sizes.kept * way.pipeline * width)
        return once, looped
