"""Runs a timetable: a loop over ticks in which every stage does what its row says and passes on what it made.

S stages, v chunks a stage, C places a chunk, M microbatches. The loop is manual over the mesh axis `pipeline` alone: what stages
run is sharded over the other axes as anywhere else, the exchange of experts nested inside. Every branch is taken or not by a
whole stage together, so collectives inside it are met by all they wait for. A stage keeps inputs of chunks, not activations:
their number is that of the timetable's slots, so memory does not grow with M where the timetable's slots do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from ernie_jax.parallel.ordering import after
from ernie_jax.parallel.pipeline.timetable import Timetable

AXIS = "pipeline"
Tree = Any


@dataclass(frozen=True)
class StageProgram:
    """What stages run. Weights are pairs (trained, frozen) of pytrees; `shared` is the same for every microbatch.

    Attributes:
      first: (edges, item, feature, shared) -> (x, loss, report), what the first virtual stage starts from.
      middle: (chunk, x, item, number of repeats, chunk's own constants, shared) -> (y, loss, statistics), layers of one chunk.
      last: (edges, y, item, shared) -> (loss, report), behind the last virtual stage.
      passed: constrains x to where it is within a stage.
    """

    first: Callable[[Tree, Tree, Tree, Tree], tuple[jax.Array, jax.Array, Tree]]
    middle: Callable[[Tree, jax.Array, Tree, jax.Array, Tree, Tree], tuple[jax.Array, jax.Array, Tree]]
    last: Callable[[Tree, jax.Array, Tree, Tree], tuple[jax.Array, Tree]]
    passed: Callable[[jax.Array], jax.Array] = lambda x: x


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PipelineInputs:
    """What a pipeline works on.

    Attributes:
      edges: (trained, frozen) weights of what comes before the first and after the last chunk; every stage has them.
      stages: (trained, frozen) weights of the chunks, arrays [S, v, C, ...].
      counts: [S, v] int32, repeats of each chunk.
      constants: pytree of arrays [S, v, ...] for `middle`, without gradients.
      shared: pytree, the same for all.
      items: pytree of arrays [M, ...], a microbatch each.
      features: pytree of arrays [M, ...] for `first`, with gradients; empty for none.
      scale: float32 scalar, what gradients are multiplied with.
    """

    edges: Tree
    stages: Tree
    counts: jax.Array
    constants: Tree
    shared: Tree
    items: Tree
    features: Tree
    scale: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PipelineSums:
    """Sums over all microbatches.

    Attributes:
      loss: of all three functions.
      first_report, last_report: of `first` and `last`.
      statistics: of `middle`, [S, v, ...].
      active: [S, 2] int32, forwards and backwards that each stage ran.
      edges, stages, features: gradients, of the trained weights; None for a pass without.
    """

    loss: jax.Array
    first_report: Tree
    last_report: Tree
    statistics: Tree
    active: jax.Array
    edges: Tree = None
    stages: Tree = None
    features: Tree = None


def run_pipeline(
    program: StageProgram,
    timetable: Timetable,
    inputs: PipelineInputs,
    mesh: Mesh,
    place: Callable[[Tree, Tree], tuple[Tree, Tree]] = lambda edges, stages: (edges, stages),
) -> PipelineSums:
    """Losses, and gradients where the timetable has backwards, of all microbatches.

    Args:
      program: what stages run.
      timetable: when.
      inputs: on what.
      mesh: of it, the axis `pipeline` has as many devices as the timetable has stages.
      place: constrains the sums of gradients of edges and of one stage's chunks [v, C, ...] to where they are to be kept.
    """
    rows = timetable.rows
    columns = {name: jnp.asarray(value) for name, value in rows.columns().items()}
    whole, staged, by_tick = PartitionSpec(), PartitionSpec(AXIS), PartitionSpec(None, AXIS)

    def on_stage(columns: Tree, stages: Tree, counts: jax.Array, constants: Tree, rest: Tree) -> PipelineSums:
        own = jax.tree.map(lambda a: a[0], (stages, counts, constants))
        runner = _Runner(program, timetable, PipelineInputs(rest[0], *own, *rest[1:]), place, rows.slots, rows.cotangent_slots)
        sums = runner.run({name: value[:, 0] for name, value in columns.items()})
        everywhere = sums.loss, sums.first_report, sums.last_report, sums.edges, sums.features
        loss, first, last, edges, features = jax.tree.map(_sum_over_stages, everywhere)
        statistics, active, chunks = jax.tree.map(lambda a: a[None], (sums.statistics, sums.active, sums.stages))
        return PipelineSums(loss, first, last, statistics, active, edges, chunks, features)

    return jax.shard_map(
        on_stage,
        mesh=mesh,
        in_specs=(by_tick, staged, staged, staged, whole),
        out_specs=PipelineSums(whole, whole, whole, staged, staged, whole, staged, whole),  # type: ignore[arg-type]
        axis_names={AXIS},
        # With the check on, the backward of the nested exchange of experts fails to lower; tests compare with one device.
        check_vma=False,
    )(
        columns,
        inputs.stages,
        inputs.counts,
        inputs.constants,
        (inputs.edges, inputs.shared, inputs.items, inputs.features, inputs.scale),
    )


def _sum_over_stages(value: jax.Array) -> jax.Array:
    """The sum over stages; 16-bit floats in float32, since XLA:CPU ends the process over their sum along one axis of several."""
    if value.dtype.itemsize == 2:
        return jax.lax.psum(value.astype(jnp.float32), AXIS).astype(value.dtype)
    return jax.lax.psum(value, AXIS)


def _at(tree: Tree, index: jax.Array) -> Tree:
    """Entry `index` of the leading axis."""
    return jax.tree.map(lambda a: a[0] if a.shape[0] == 1 else jax.lax.dynamic_index_in_dim(a, index, keepdims=False), tree)


def _add_at(total: Tree, index: jax.Array, part: Tree) -> Tree:
    """`total` with `part` added to entry `index` of the leading axis."""
    return jax.tree.map(
        lambda t, p: t + p[None].astype(t.dtype) if t.shape[0] == 1 else t.at[index].add(p.astype(t.dtype)), total, part
    )


def _add(total: Tree, part: Tree) -> Tree:
    return jax.tree.map(lambda t, p: t + p.astype(t.dtype), total, part)


def _float32_zeros(tree: Tree) -> Tree:
    return jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), tree)


@dataclass(frozen=True)
class _Runner:
    """One stage's loop; arrays of `inputs` are this stage's, [v, ...] where they were [S, v, ...]."""

    program: StageProgram
    timetable: Timetable
    inputs: PipelineInputs
    place: Callable[[Tree, Tree], tuple[Tree, Tree]]
    slots: int
    cotangent_slots: int

    def run(self, columns: dict[str, jax.Array]) -> PipelineSums:
        inputs = self.inputs
        item, feature = (_at(a, jnp.int32(0)) for a in (inputs.items, inputs.features))
        x, _, first = jax.eval_shape(lambda: self.program.first(inputs.edges, item, feature, inputs.shared))
        _, loss, statistics = jax.eval_shape(lambda x: self._middle(x, item, jnp.int32(0)), x)
        _, last = jax.eval_shape(lambda x: self.program.last(inputs.edges, x, item, inputs.shared), x)
        loss, first, last = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), (loss, first, last))
        virtual = self.timetable.virtual_stages
        statistics = jax.tree.map(lambda a: jnp.zeros((virtual, *a.shape), a.dtype), statistics)
        sums = PipelineSums(loss, first, last, statistics, jnp.zeros(2, jnp.int32))
        backward = self.timetable.backward_tick is not None
        if backward:
            edges, stages = self.place(*map(_float32_zeros, (inputs.edges[0], inputs.stages[0])))
            sums = replace(sums, edges=edges, stages=stages, features=jax.tree.map(jnp.zeros_like, inputs.features))

        def buffer(slots: int) -> jax.Array:
            return jnp.zeros((slots + 1, *x.shape), x.dtype)

        carry = sums, buffer(self.slots), buffer(self.cotangent_slots) if backward else None
        (sums, _, _), _ = jax.lax.scan(self._tick_backward if backward else self._tick_forward, carry, columns)
        if backward:
            # Once more behind the loop: where the sums go next would otherwise decide how the loop has them.
            edges, stages = self.place(sums.edges, sums.stages)
            sums = replace(sums, edges=edges, stages=stages)
        return sums

    def _middle(self, x: jax.Array, item: Tree, chunk: jax.Array) -> tuple[jax.Array, jax.Array, Tree]:
        inputs = self.inputs
        weights, count, constants = _at((inputs.stages, inputs.counts, inputs.constants), chunk)
        return self.program.middle(weights, x, item, count, constants, inputs.shared)

    def _input(self, waiting: jax.Array, slot: jax.Array, item: Tree, feature: Tree) -> jax.Array:
        """What a chunk starts from: what waits in a slot, or of the first virtual stage the microbatch itself."""
        inputs = self.inputs
        x: jax.Array = jax.lax.cond(
            slot < 0,
            lambda: self.program.passed(self.program.first(inputs.edges, item, feature, inputs.shared)[0]),
            lambda: self._taken(waiting, slot),
        )
        return x

    def _taken(self, waiting: jax.Array, slot: jax.Array) -> jax.Array:
        """What waits in a slot, constrained as what the first virtual stage makes is: XLA wants both branches of a choice alike."""
        return self.program.passed(jax.lax.dynamic_index_in_dim(waiting, slot, keepdims=False))

    def _send(self, x: jax.Array, direction: int) -> jax.Array:
        """To the next stage (1) or the one before (-1), in a ring: chunk after chunk goes from the last to the first."""
        stages = self.timetable.stages
        with jax.named_scope("pipeline_send"):
            return jax.lax.ppermute(x, AXIS, [(s, (s + direction) % stages) for s in range(stages)])

    def _tick_forward(self, carry: Tree, row: dict[str, jax.Array]) -> tuple[Tree, None]:
        """A tick of a pass without gradients; the last virtual stage runs what is behind it too."""
        sums, waiting, _ = carry
        inputs, program = self.inputs, self.program
        final = self.timetable.virtual_stages - 1

        def active(sums: PipelineSums) -> tuple[jax.Array, PipelineSums]:
            item, feature = _at((inputs.items, inputs.features), row["forward"])
            chunk = row["forward_chunk"]

            def from_tokens(sums: PipelineSums) -> tuple[jax.Array, PipelineSums]:
                x, loss, report = program.first(inputs.edges, item, feature, inputs.shared)
                return program.passed(x), replace(sums, loss=sums.loss + loss, first_report=_add(sums.first_report, report))

            def from_slot(sums: PipelineSums) -> tuple[jax.Array, PipelineSums]:
                return self._taken(waiting, row["forward_slot"]), sums

            x, sums = jax.lax.cond(row["forward_slot"] < 0, from_tokens, from_slot, sums)
            with jax.named_scope("stage_forward"):
                y, loss, statistics = self._middle(x, item, chunk)
            sums = replace(sums, loss=sums.loss + loss, statistics=_add_at(sums.statistics, chunk, statistics))

            def behind(sums: PipelineSums) -> PipelineSums:
                loss, report = program.last(inputs.edges, y, item, inputs.shared)
                return replace(sums, loss=sums.loss + loss, last_report=_add(sums.last_report, report))

            is_last = (jax.lax.axis_index(AXIS) == self.timetable.stages - 1) & (chunk == final)
            sums = jax.lax.cond(is_last, behind, lambda sums: sums, sums)
            return y, replace(sums, active=sums.active + jnp.array([1, 0], jnp.int32))

        def idle(sums: PipelineSums) -> tuple[jax.Array, PipelineSums]:
            return jnp.zeros(waiting.shape[1:], waiting.dtype), sums

        y, sums = jax.lax.cond(row["forward"] >= 0, active, idle, sums)
        waiting = jax.lax.dynamic_update_index_in_dim(waiting, self._send(y, 1), row["arrival_slot"], 0)
        return (sums, waiting, None), None

    def _tick_backward(self, carry: Tree, row: dict[str, jax.Array]) -> tuple[Tree, None]:
        """A tick of a pass with gradients: a forward, then a backward."""
        sums, waiting, cotangents = carry
        inputs = self.inputs
        nothing = jnp.zeros(waiting.shape[1:], waiting.dtype)

        def forward() -> jax.Array:
            item, feature = _at((inputs.items, inputs.features), row["forward"])
            x = self._input(waiting, row["forward_slot"], item, feature)
            with jax.named_scope("stage_forward"):
                return self._middle(x, item, row["forward_chunk"])[0]

        y = jax.lax.cond(row["forward"] >= 0, forward, lambda: nothing)
        go = after(row["backward"], y) >= 0
        dx, sums = jax.lax.cond(go, self._backward(waiting, cotangents, row), lambda sums: (nothing, sums), sums)
        sums = replace(sums, active=sums.active + jnp.stack([row["forward"] >= 0, row["backward"] >= 0]).astype(jnp.int32))
        arrived = self._send(after(y, dx), 1)
        returned = self._send(after(dx, arrived), -1)
        waiting = jax.lax.dynamic_update_index_in_dim(waiting, arrived, row["arrival_slot"], 0)
        cotangents = jax.lax.dynamic_update_index_in_dim(cotangents, returned, row["cotangent_arrival_slot"], 0)
        return (sums, waiting, cotangents), None

    def _backward(
        self, waiting: jax.Array, cotangents: jax.Array, row: dict[str, jax.Array]
    ) -> Callable[[PipelineSums], tuple[jax.Array, PipelineSums]]:
        inputs, program = self.inputs, self.program
        (edges, frozen_edges), (stages, frozen_stages) = inputs.edges, inputs.stages

        def active(sums: PipelineSums) -> tuple[jax.Array, PipelineSums]:
            item, feature = _at((inputs.items, inputs.features), row["backward"])
            chunk = row["backward_chunk"]
            weights, frozen, count, constants = _at((stages, frozen_stages, inputs.counts, inputs.constants), chunk)
            x = self._input(waiting, row["backward_slot"], item, feature)

            def middle(weights: Tree, x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], Tree]:
                y, loss, statistics = program.middle((weights, frozen), x, item, count, constants, inputs.shared)
                return (y, loss), statistics

            with jax.named_scope("stage_backward"):
                (y, loss), pull, statistics = jax.vjp(middle, weights, x, has_aux=True)
            sums = replace(sums, loss=sums.loss + loss, statistics=_add_at(sums.statistics, chunk, statistics))

            def from_loss(sums: PipelineSums) -> tuple[jax.Array, PipelineSums]:
                def last(edges: Tree, y: jax.Array) -> tuple[jax.Array, Tree]:
                    return program.last((edges, frozen_edges), y, item, inputs.shared)

                loss, pull_last, report = jax.vjp(last, edges, y, has_aux=True)
                d_edges, dy = pull_last(inputs.scale)
                sums = replace(sums, loss=sums.loss + loss, last_report=_add(sums.last_report, report))
                return dy, self._placed(replace(sums, edges=_add(sums.edges, d_edges)))

            def from_next(sums: PipelineSums) -> tuple[jax.Array, PipelineSums]:
                return jax.lax.dynamic_index_in_dim(cotangents, row["cotangent_slot"], keepdims=False), sums

            dy, sums = jax.lax.cond(row["cotangent_slot"] < 0, from_loss, from_next, sums)
            with jax.named_scope("stage_backward"):
                d_weights, dx = pull((dy, inputs.scale))
            sums = self._placed(replace(sums, stages=_add_at(sums.stages, chunk, d_weights)))

            def to_tokens(sums: PipelineSums) -> PipelineSums:
                def first(edges: Tree, feature: Tree) -> tuple[tuple[jax.Array, jax.Array], Tree]:
                    x, loss, report = program.first((edges, frozen_edges), item, feature, inputs.shared)
                    return (x, loss), report

                (_, loss), pull_first, report = jax.vjp(first, edges, feature, has_aux=True)
                d_edges, d_feature = pull_first((dx, inputs.scale))
                sums = replace(sums, loss=sums.loss + loss, first_report=_add(sums.first_report, report))
                features = _add_at(sums.features, row["backward"], d_feature)
                return self._placed(replace(sums, edges=_add(sums.edges, d_edges), features=features))

            return dx, jax.lax.cond(row["backward_slot"] < 0, to_tokens, lambda sums: sums, sums)

        return active

    def _placed(self, sums: PipelineSums) -> PipelineSums:
        edges, stages = self.place(sums.edges, sums.stages)
        return replace(sums, edges=edges, stages=stages)
