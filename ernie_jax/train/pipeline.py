"""Losses and gradients of a model in pipeline stages. M microbatches, S stages, v chunks a stage, C repeats a chunk, E experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ernie_jax.config.run import RunConfig
from ernie_jax.models import Batch, inputs_of
from ernie_jax.models.batches import PATCH_KEYS
from ernie_jax.models.decoder import Collect
from ernie_jax.moe import RouterOutput, RouterStats
from ernie_jax.objectives import IGNORE
from ernie_jax.objectives.pretraining import (
    HeadLosses,
    LossParts,
    RouterLossWeights,
    TokenWeights,
    gate_losses,
    head_loss,
    loss_parts,
    token_losses_of,
)
from ernie_jax.objectives.step_totals import StepTotals
from ernie_jax.parallel import after
from ernie_jax.parallel.pipeline import (
    PipelineInputs,
    PipelineSums,
    StageProgram,
    Timetable,
    forward_timetable,
    make_timetable,
    run_pipeline,
)
from ernie_jax.sharding import Layout, constrain, make_layout, use_layout
from ernie_jax.train.loss_scale import LossScale, scaled, unscaled
from ernie_jax.train.optimizer import Arrays, is_gate
from ernie_jax.train.stages import ModelStages, StageWeights
from ernie_jax.train.state import moment_layout


@dataclass(frozen=True)
class PipelineResult:
    """Of all microbatches of a step.

    Attributes:
      total: what is differentiated.
      parts: what is reported.
      gradients: by path, None of a pass without.
      active: [S, 2] int32, forwards and backwards that each stage ran.
    """

    total: jax.Array
    parts: LossParts
    gradients: Arrays | None
    active: jax.Array


@dataclass(frozen=True)
class PipelinedObjective:
    """The pre-training objective of a model in stages.

    Attributes:
      stages: the cut model.
      weights, token_weights: see `objectives.pretraining`.
      sum_layout: of gradients while a stage sums them.
      gradient_layout: of gradients after that.
      with_head: whether the head and its loss are wanted; without them only the routers are.
    """

    stages: ModelStages
    weights: RouterLossWeights
    token_weights: TokenWeights
    sum_layout: Layout
    gradient_layout: Layout
    with_head: bool = True

    def __call__(
        self,
        timetable: Timetable,
        values: Arrays,
        fixed: Arrays,
        parts: Batch,
        totals: StepTotals,
        loss_scale: LossScale | None = None,
    ) -> PipelineResult:
        """One step's losses, and gradients where the timetable has backwards.

        Args:
          timetable: the schedule for the M microbatches.
          values: weights by path that are trained.
          fixed: all others, biases too.
          parts: arrays [M, ...] of a batch.
          totals: of the whole step, its share 1.
          loss_scale: a factor on the loss for the length of the backward pass.
        """
        stages = self.stages
        trained, frozen = stages.split(values), stages.split(fixed)
        features, pull_tower = self._features(trained.tower, frozen.tower, parts)
        program = StageProgram(self._first, self._middle, self._last, self._passed)
        inputs = PipelineInputs(
            edges=(trained.edges, frozen.edges),
            stages=(trained.stages, frozen.stages),
            counts=jnp.asarray(stages.plan.counts_by_stage),
            constants=self._staged_choices(totals),
            shared=totals,
            items=self._items(parts),
            features=features,
            scale=scaled(jnp.ones((), jnp.float32), loss_scale),
        )
        sums = run_pipeline(program, timetable, inputs, stages.layout.mesh, lambda e, s: stages.placed(e, s, self.sum_layout))
        orthogonal, gate_gradients = self._gates(values, fixed, totals)
        gradients = None
        if timetable.backward_tick is not None:
            tower = pull_tower(sums.features) if trained.tower else {}
            gradients = stages.join(StageWeights(sums.edges, sums.stages, tower), self.gradient_layout)
            gradients = unscaled(gradients, loss_scale)
            gradients |= {path: gradients[path] + g for path, g in gate_gradients.items()}
        total = sums.loss + self.weights.gate_loss(orthogonal)
        return PipelineResult(total, self._report(sums, orthogonal), gradients, sums.active)

    def _items(self, parts: Batch) -> Batch:
        """The arrays [M, B, T, ...] that stages take, padded to a length that the mesh divides.

        Otherwise the partitioner shifts tokens between shards, by permutations that on CPU wait for all devices, other stages' too.
        """
        layout = self.stages.layout
        items = {key: value for key, value in parts.items() if key not in PATCH_KEYS}
        extra = -items["input_ids"].shape[2] % layout.shards("sequence")
        fill = {"labels": IGNORE, "feature_ids": -1}

        def padded(key: str, value: jax.Array) -> jax.Array:
            widths = ((0, 0), (0, 0), (0, extra), *((0, 0),) * (value.ndim - 3))
            return jnp.pad(value, widths, constant_values=fill.get(key, 0))

        return {key: padded(key, value) for key, value in items.items()} if extra else items

    def _features(self, tower: Arrays, frozen: Arrays, parts: Batch) -> tuple[Any, Any]:
        """Rows [M, ...] of the images of all microbatches, and the function from their cotangents to the tower's gradients."""
        if not any(key in PATCH_KEYS for key in parts):
            return (), None

        def rows(tower: Arrays) -> Any:
            # Made again in the backward pass, a microbatch at a time, so that only rows are kept.
            @jax.checkpoint
            def of_part(tower: Arrays, part: Batch) -> Any:
                with use_layout(self.stages.layout):
                    return self.stages.model(tower, frozen).features(inputs_of(part))

            return jax.lax.scan(lambda _, part: (None, of_part(tower, part)), None, parts)[1]

        features, pull = jax.vjp(rows, tower)
        return features, lambda cotangents: pull(cotangents)[0]

    def _first(self, edges: Any, item: Batch, feature: Any, totals: StepTotals) -> tuple[jax.Array, jax.Array, Any]:
        model, inputs = self.stages.model(*edges), inputs_of(item)
        with use_layout(self.stages.layout):
            with jax.named_scope("embed"):
                x = model.embedded(inputs, None if isinstance(feature, tuple) else feature)
            context, routers = model.context(inputs), []
            for segment in list(model.decoder.segments)[: self.stages.segment]:
                x, _, outputs, _ = segment(x, context, None, Collect())
                routers += outputs
        return x, *self._router_losses(routers, self._choices(self.stages.before, totals), totals)

    def _middle(
        self, chunk: Any, x: jax.Array, item: Batch, count: jax.Array, choices: Any, totals: StepTotals
    ) -> tuple[jax.Array, jax.Array, Any]:
        # Equal chunks need no branch around each layer.
        partial = len(set(self.stages.plan.counts)) > 1
        with use_layout(self.stages.layout):
            context = self.stages.model().context(inputs_of(item))
            x, _, outputs, _ = self.stages.chunk(*chunk).run(x, context, None, Collect(), count if partial else None)
        routers = [output for output in outputs if output is not None]
        return x, *self._router_losses(routers, choices, totals)

    def _last(self, edges: Any, x: jax.Array, item: Batch, totals: StepTotals) -> tuple[jax.Array, Any]:
        model, inputs = self.stages.model(*edges), inputs_of(item)
        behind = list(model.decoder.segments)[self.stages.segment + 1 :]
        with use_layout(self.stages.layout):
            context, routers = model.context(inputs), []
            for segment in behind:
                x, _, outputs, _ = segment(x, context, None, Collect())
                routers += outputs
            loss, report = self._router_losses(routers, self._choices(self.stages.behind, totals), totals)
            kinds = item.get("document_kinds")
            if not self.with_head:
                nothing = HeadLosses(jnp.zeros((), jnp.float32), jnp.zeros(len(totals.modalities)))
                return loss, (nothing, report)
            head, losses = head_loss(model, x, inputs, item["labels"], totals, self.token_weights, kinds)
        return loss + head, (losses, report)

    def _passed(self, x: jax.Array) -> jax.Array:
        with use_layout(self.stages.layout):
            return constrain(x, "batch", "sequence", "activation_embed")

    def _router_losses(
        self, routers: Sequence[RouterOutput], choices: Sequence[Any], totals: StepTotals
    ) -> tuple[jax.Array, dict[str, Any]]:
        """(what the routers add to the total, balance and z losses by modality and what there is to count).

        Args:
          routers: of some layers, or of all repeats of some.
          choices: for each modality, the step's choices of each of these [..., E], or None.
          totals: of the step.
        """
        loss = jnp.zeros((), jnp.float32)
        sums = []
        for i, (modality, chosen) in enumerate(zip(totals.modalities, choices, strict=True)):
            aux = z = jnp.zeros((), jnp.float32)
            for j, router in enumerate(routers):
                stats = router.vision if i else router.stats
                assert stats is not None
                each = token_losses_of(stats, modality.tokens, None if chosen is None else chosen[j])
                aux, z = aux + jnp.sum(each[0]), z + jnp.sum(each[1])
            loss += self.weights.token_loss(i, aux, z)
            sums.append((aux, z))
        aux, z = (jnp.stack(values) for values in zip(*sums, strict=True))
        return loss, {"aux": aux, "z": z, "routers": tuple(routers)}

    def _choices(self, layers: Sequence[int], totals: StepTotals) -> list[Any]:
        return [None if m.top_k is None else [m.top_k[layer] for layer in layers] for m in totals.modalities]

    def _staged_choices(self, totals: StepTotals) -> list[Any]:
        """For each modality and each layer of the pipelined unit, [S, v, C, E] choices of the step, or None."""
        return [
            None
            if m.top_k is None
            else [self.stages.plan.to_stages(jnp.stack([m.top_k[layer] for layer in layers])) for layers in self.stages.moe_layers]
            for m in totals.modalities
        ]

    def _gates(self, values: Arrays, fixed: Arrays, totals: StepTotals) -> tuple[jax.Array, Arrays]:
        """Orthogonal losses [modalities], which concern weights alone, and their gradients by path."""

        def losses(gates: Arrays) -> tuple[jax.Array, jax.Array]:
            found = gate_losses(self.stages.model(values, fixed, gates), totals, self.weights)
            return self.weights.gate_loss(found), found

        if not self.weights.orthogonal:
            return losses({})[1], {}
        gates = {path: value for path, value in values.items() if is_gate(path)}
        (_, found), gradients = jax.value_and_grad(losses, has_aux=True)(gates)
        return found, gradients

    def _report(self, sums: PipelineSums, orthogonal: jax.Array) -> LossParts:
        losses, last = sums.last_report
        first, middle = sums.first_report, sums.statistics
        aux, z = (first[name] + last[name] + middle[name].sum((0, 1)) for name in ("aux", "z"))
        repeats = jax.tree.map(self.stages.gathered, middle["routers"])
        of_stages = [jax.tree.map(lambda a, r=r: a[r], router) for r in range(self.stages.plan.repeats) for router in repeats]
        routers: list[RouterOutput] = [*first["routers"], *of_stages, *last["routers"]]
        stats: list[tuple[RouterStats, ...]] = [tuple(router.stats for router in routers)]
        if len(aux) > 1:
            stats.append(tuple(router.vision for router in routers if router.vision is not None))
        return loss_parts(losses, aux, z, orthogonal, tuple(stats))


@dataclass(frozen=True)
class PipelinedGradients:
    """Loss and gradients of a step by the run's schedule.

    Attributes:
      objective: of the model in stages.
      timetable: the schedule.
    """

    objective: PipelinedObjective
    timetable: Timetable

    @classmethod
    def of(cls, run: RunConfig, layout: Layout, weights: RouterLossWeights, token_weights: TokenWeights) -> PipelinedGradients:
        """For a mesh with stages.

        Raises:
          ValueError: fewer layers than virtual stages.
        """
        kept = moment_layout(run, layout)
        within, summed = layout, kept
        if layout.mesh.shape["tensor"] > 1:
            # Weights split along both of their axes would be turned around inside a stage, by permutations that on CPU wait for
            # all devices, other stages' too. With a tensor axis ZeRO therefore brings weights together, and splits gradients,
            # once a step.
            within = summed = make_layout(layout.mesh, run.model, "tp_sp") if run.mesh.rules == "fsdp" else layout
        objective = PipelinedObjective(ModelStages(run, within), weights, token_weights, summed, kept)
        timetable = make_timetable(
            run.pipeline.schedule,
            stages=layout.mesh.shape["pipeline"],
            microbatches=run.parts,
            virtual_stages=run.pipeline.virtual_stages,
        )
        return cls(objective, timetable)

    def __call__(
        self,
        values: Arrays,
        fixed: Arrays,
        parts: Batch,
        totals: StepTotals,
        loss_scale: LossScale | None = None,
        *,
        count_first: bool,
    ) -> PipelineResult:
        """See `PipelinedObjective`; with `count_first`, the step's choices are counted by a pass without gradients before."""
        if count_first:
            with jax.named_scope("count_choices"):
                counted = self.forward(values, fixed, parts, totals, with_head=False).parts
            text, vision = (tuple(s.top_k for s in stats) for stats in (counted.stats, counted.vision_stats))
            totals = after(totals.with_choices(text, vision), counted.aux)
        return self.objective(self.timetable, values, fixed, parts, totals, loss_scale)

    def forward(self, values: Arrays, fixed: Arrays, parts: Batch, totals: StepTotals, *, with_head: bool = True) -> PipelineResult:
        """The losses alone, of any number of microbatches."""
        objective = replace(self.objective, with_head=with_head)
        plan = objective.stages.plan
        microbatches = len(parts["input_ids"])
        timetable = forward_timetable(stages=plan.stages, microbatches=microbatches, virtual_stages=plan.virtual_stages)
        return objective(timetable, values, fixed, parts, totals)
