"""The moments of a step in pipeline stages that can be its fullest, in bytes of one device beside the step's arguments.

S stages, v chunks a stage, C places of a chunk, R repeats of the segment that is spread (see `train.stages`).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable

from ernie_jax.config.remat import remat_plan, remat_within
from ernie_jax.config.run import RunConfig
from ernie_jax.config.segments import Segment, segments_of
from ernie_jax.models.decoder import kinds_of
from ernie_jax.parallel.pipeline import StagePlan, make_timetable
from ernie_jax.plan.activation_memory import FLOAT, INT, Bytes, LayerSizes, kept_by_unit, parts, times
from ernie_jax.plan.model_weights import ModelWeight
from ernie_jax.plan.pipeline_shares import stage_plan
from ernie_jax.plan.state_memory import elements, trained_of, weights_of
from ernie_jax.plan.step_memory import open_between, unit_backward
from ernie_jax.plan.vision_memory import feature_bytes, tower_backward, tower_kept
from ernie_jax.plan.workspace import loss_bytes
from ernie_jax.sharding import Layout, make_layout
from ernie_jax.train.stages import pipelined_segment

Count = Callable[[ModelWeight], int]


def pipeline_moments(run: RunConfig, sizes: LayerSizes, layout: Layout, moments: Layout) -> list[Bytes]:
    """Of a run with stages."""
    spread, segments, plan = pipelined_segment(run.model), segments_of(run.model), stage_plan(run)
    unit = segments[spread].unit
    # With a tensor axis ZeRO brings weights together once a step (see `PipelinedGradients`).
    within = make_layout(layout.mesh, run.model, "tp_sp") if sizes.shape.tensor > 1 else layout
    summed = within if sizes.shape.tensor > 1 else moments
    whole = elements(within, without=("pipeline",))
    base = weight_bytes(run, sizes, plan, spread, whole)
    trained = trained_of(run)
    of_stage, of_edges = [w for w in trained if w.segment == spread], [w for w in trained if w.segment != spread]
    held = elements(summed, without=("pipeline",))
    share = plan.places * plan.virtual_stages / plan.repeats
    # Sums over microbatches, of the stage's layers and of what every stage has.
    sums = parts(gradients=sum(share * held(w) for w in of_stage) * FLOAT + sum(map(held, of_edges)) * FLOAT)
    # Those of the chunk at hand, in the format of the weights; a single layer's are no stack that is there from the beginning.
    stacked = 0 if plan.places == 1 else plan.places / plan.repeats
    chunk = parts(gradients=sum(stacked * held(w) * _itemsize(w, sizes) for w in of_stage))
    base = base + sums + waiting_bytes(run, sizes, plan.stages) + feature_bytes(run, sizes, layout, run.parts)
    chunk.update(chunk_weights(run, sizes, plan, spread, whole))
    kept = times(plan.places, kept_by_unit(sizes, run.compute.remat, unit))
    if len(set(plan.counts)) > 1 and remat_plan(remat_within(run.compute.remat, kinds_of(unit, run.model))).everything:
        kept += kept_by_branches(run, sizes, plan, spread, whole)
    inner = Segment(0, unit, plan.places)
    between = open_between(run, sizes, layout, [inner]) if plan.places == 1 else kept
    found = [base + between + loss_bytes(run, sizes, layout)]
    branch = len(set(plan.counts)) > 1
    found += [base + chunk + kept + moment for moment in unit_backward(run, sizes, layout, unit, branch=branch)]
    found += [base + moment for moment in edge_moments(run, sizes, layout, segments, spread)]
    # A tower's backward pass, a microbatch at a time, with the features' gradients of all.
    found.append(sums + feature_bytes(run, sizes, layout, run.parts) + tower_kept(run, sizes) + tower_backward(run, sizes))
    # Behind the loop the sums go to where the moments are.
    found.append(sums + parts(gradients=sum(map(elements(moments), trained)) * FLOAT))
    return found


def weight_bytes(run: RunConfig, sizes: LayerSizes, plan: StagePlan, spread: int, whole: Count) -> Bytes:
    """The weights that a stage works with, brought together for the length of a step: of its chunks in the compute format, of the
    ends of the pipeline in their own. XLA:CPU has 16-bit ones twice: experts' as integers, the others as float32."""
    share = plan.places * plan.virtual_stages / plan.repeats
    total = 0.0
    for weight in weights_of(run):
        if weight.path.startswith(("vision_tower/", "resampler/")):
            continue
        count = whole(weight)
        width = _itemsize(weight, sizes)
        if weight.segment != spread:
            total += count * width
            continue
        total += share * count * width
        if sizes.on_cpu and width < FLOAT:
            total += share * count * (width if weight.axes[1] == "expert" else FLOAT)
    return parts(collectives=total)


def chunk_weights(run: RunConfig, sizes: LayerSizes, plan: StagePlan, spread: int, whole: Count) -> Bytes:
    """Copies of the weights of the chunk at hand: of all, where a stage has several chunks to choose from; else of the experts,
    where emptier chunks make a branch of each layer and what is read in it comes out of the branch. On CPU the experts' copy as
    integers is that one already."""
    total = 0.0
    for weight in weights_of(run):
        if weight.segment != spread:
            continue
        size = plan.places / plan.repeats * whole(weight) * _itemsize(weight, sizes)
        experts = weight.cast and weight.axes[1] == "expert"
        bits = sizes.on_cpu and sizes.shape.width < FLOAT
        if plan.virtual_stages > 1 or (experts and len(set(plan.counts)) > 1 and not bits):
            total += size
    return parts(collectives=total)


def kept_by_branches(run: RunConfig, sizes: LayerSizes, plan: StagePlan, spread: int, whole: Count) -> Bytes:
    """What layers behind a branch keep under the policy `none` beside what others do: the experts' rows, activation and product,
    and in each layer a copy of the chunk's weights of their first product where they are float32. Of one layer more, what is
    read back and the zeros of the branch that is not taken."""
    shape = sizes.shape
    width = shape.rows * sum(sizes.expert_widths) / shape.tensor * sizes.wide
    rows = shape.rows * run.model.hidden_size * sizes.wide
    experts = [w for w in weights_of(run) if w.segment == spread and w.cast and w.axes[1] == "expert"]
    chunk = sum(plan.places / plan.repeats * whole(w) for w in experts) * FLOAT
    # Gate and up are two thirds of them.
    weights = chunk * (2 / 3 * (plan.places + 1) + 1) if shape.width == FLOAT else 0
    return parts(dispatch=plan.places * (rows + 2 * width) + 2 * width, collectives=weights)


def waiting_bytes(run: RunConfig, sizes: LayerSizes, stages: int) -> Bytes:
    """Inputs and cotangents of chunks that wait in slots, one more of each for what nobody waits for, those that the neighbours
    send, and the microbatches' arrays of integers."""
    slots = _slots(run.pipeline.schedule, stages, run.parts, run.pipeline.virtual_stages)
    keys = 9 if run.model.vision is not None else 4
    items = run.parts * sizes.shape.tokens * keys * INT
    return parts(activations=(sum(slots) + 2) * sizes.stream * sizes.shape.width + 3 * sizes.stream * sizes.wide, batch=items)


@functools.lru_cache(maxsize=256)
def _slots(schedule: str, stages: int, microbatches: int, virtual: int) -> tuple[int, int]:
    rows = make_timetable(schedule, stages=stages, microbatches=microbatches, virtual_stages=virtual).rows
    return rows.slots, rows.cotangent_slots


def edge_moments(run: RunConfig, sizes: LayerSizes, layout: Layout, segments: Iterable[Segment], spread: int) -> list[Bytes]:
    """The backward pass of the layers before and behind those that are spread, as the first and the last stage run it."""
    found: list[Bytes] = []
    for number, segment in enumerate(segments):
        if number == spread:
            continue
        kept: Bytes = Counter()
        if segment.repeats > 1:
            kept = times(segment.repeats, kept_by_unit(sizes, run.compute.remat, segment.unit))
        found += [kept + moment for moment in unit_backward(run, sizes, layout, segment.unit)]
    return found


def _itemsize(weight: ModelWeight, sizes: LayerSizes) -> int:
    return sizes.shape.width if weight.cast else weight.itemsize
