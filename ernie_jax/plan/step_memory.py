"""The moments of a step without pipeline stages that can be its fullest, in bytes of one device beside the step's arguments."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from ernie_jax.config.remat import remat_plan, remat_within
from ernie_jax.config.run import RunConfig
from ernie_jax.config.segments import Segment, segments_of
from ernie_jax.models.decoder import kinds_of
from ernie_jax.plan.activation_memory import (
    FLOAT,
    Bytes,
    LayerSizes,
    kept_by_unit,
    mlp_backward,
    open_layer,
    open_mlp,
    parts,
    times,
)
from ernie_jax.plan.model_weights import ModelWeight
from ernie_jax.plan.state_memory import elements, trained_of, weights_of
from ernie_jax.plan.vision_memory import feature_bytes, tower_backward, tower_kept
from ernie_jax.plan.workspace import expert_gradients, expert_moments, loss_bytes, open_experts
from ernie_jax.sharding import BATCH_AXES, Layout, make_layout


def step_moments(run: RunConfig, sizes: LayerSizes, layout: Layout, moments: Layout) -> list[Bytes]:
    """Of a run without stages."""
    segments = segments_of(run.model)
    scanned = [i for i, segment in enumerate(segments) if segment.repeats > 1]
    trained, moved = trained_of(run), elements(moments)

    def summed(weights: Iterable[ModelWeight]) -> Bytes:
        return parts(gradients=sum(map(moved, weights)) * FLOAT)

    # Of stacks that a scan differentiates the sums are there from the beginning, as zeros.
    stacks = summed(w for w in trained if w.segment in scanned or w.path.startswith("vision_tower/blocks/"))
    # With several microbatches the step's sums too.
    carried = summed(trained) if run.parts > 1 else Counter()
    kept: Bytes = Counter()
    for i in scanned:
        kept.update(times(segments[i].repeats, kept_by_unit(sizes, run.compute.remat, segments[i].unit)))
        kept.update(kept_weights(run, sizes, layout, i))
    between = open_between(run, sizes, layout, segments) + carried + stacks + kept + brought_once(run, sizes, layout, scanned)
    between += tower_kept(run, sizes) + feature_bytes(run, sizes, layout, 1)
    further = further_blocks(run, sizes)
    found = [between + further + moment for moment in (loss_bytes(run, sizes, layout), *forward_moments(run, sizes))]
    behind = head_gradients(run, sizes, layout, summed) + embedding_gradient(run, sizes)
    # ZeRO 3 too has the weights of a layer, and their gradient, whole while it runs.
    used = make_layout(layout.mesh, run.model, "tp_sp")
    local = elements(used)
    for i in scanned:
        found += [between + behind + moment for moment in unit_backward(run, sizes, layout, segments[i].unit)]
        # A layer's gradients, of whole weights, before and after their sum over the devices that share them; a sum that
        # splits what it adds, which XLA:CPU does not have, leaves only a part of them.
        copies = 2 if sizes.on_cpu or run.mesh.zero == 0 else 1
        alone = sum(local(w) for w in trained if w.segment == i and is_shared(w, used)) / segments[i].repeats
        found.append(between + behind + parts(collectives=copies * alone * sizes.wide, activations=3 * sizes.stream * sizes.wide))
    # The first layers' backward, and the embedding's, with all other gradients there.
    last = carried + summed(trained) + parts(gradients=run.model.vocab_size * run.model.hidden_size * FLOAT)
    found.append(last + parts(activations=2 * sizes.stream * sizes.wide))
    found.append(carried + summed(trained) + tower_kept(run, sizes) + tower_backward(run, sizes))
    for segment in segments:
        if segment.repeats == 1 and 0 not in scanned:
            found += [carried + summed(trained) + moment for moment in unit_backward(run, sizes, layout, segment.unit)]
    return found


def is_shared(weight: ModelWeight, layout: Layout) -> bool:
    """Whether several batch shards have the same numbers of a weight, whose gradient they therefore sum."""
    used = {axis for name in weight.axes if name for axis in layout.rules.mesh_axes(name)}
    return layout.axis_size(*(axis for axis in BATCH_AXES if axis not in used)) > 1


def kept_weights(run: RunConfig, sizes: LayerSizes, layout: Layout, segment: int) -> Bytes:
    """Matrices of a stack in the compute format, which the policy `none` keeps where that is not their own; the experts' are read
    where they are on CPU."""
    plan = remat_plan(remat_within(run.compute.remat, kinds_of(segments_of(run.model)[segment].unit, run.model)))
    if not plan.everything or sizes.shape.width == FLOAT:
        return Counter()
    local = elements(layout)
    cast = [w for w in weights_of(run) if w.segment == segment and w.cast and not (sizes.on_cpu and w.axes[1] == "expert")]
    return parts(activations=sum(map(local, cast)) * sizes.wide)


def brought_once(run: RunConfig, sizes: LayerSizes, layout: Layout, scanned: Sequence[int]) -> Bytes:
    """What several microbatches need alike is made before the first of them, of weights that no scan takes apart: with ZeRO 3 whole
    ones, and with a tensor axis the whole table of embeddings; where the compute format is another, in that."""
    if run.parts == 1:
        return Counter()
    table = run.model.vocab_size * run.model.hidden_size
    split, cast = splits_weights(layout), sizes.shape.width < FLOAT
    if not split and not cast:
        return parts(collectives=table * FLOAT if sizes.shape.tensor > 1 else 0)
    whole = elements(layout, without=BATCH_AXES if split else ())
    outside = [w for w in weights_of(run) if w.segment not in scanned and len(w.shape) > 1]
    # A table is looked up and multiplied: on CPU also as the float32 copy that products are made of.
    of_table = sizes.shape.width + (sizes.wide if cast and sizes.on_cpu else 0)
    return parts(collectives=sum(whole(w) * (sizes.wide if w.cast else of_table) for w in outside))


def splits_weights(layout: Layout) -> bool:
    """Whether ZeRO 3 has split the weights over the batch axes."""
    return layout.axis_size(*(axis for axis in layout.rules.mesh_axes("embed") if axis in BATCH_AXES)) > 1


def further_blocks(run: RunConfig, sizes: LayerSizes) -> Bytes:
    """What the blocks of multi-token prediction keep from their forward pass to the loss, and their inputs."""
    if not run.mtp_blocks:
        return Counter()
    block = kept_by_unit(sizes, run.compute.remat, ("dense",))
    # The two norms before the projection are no part of the layer; the projection's input, the embeddings, and the result.
    block = times(run.mtp_blocks, block + parts(activations=(6 + 2 + 1 + 1) * sizes.stream * sizes.wide))
    table = run.model.vocab_size * run.model.hidden_size * FLOAT
    # Room for each head's gradient and each look-up's is there from the beginning too.
    return block + parts(gradients=(1 + run.mtp_blocks) * table * (1 + 1 / sizes.shape.tensor))


def forward_moments(run: RunConfig, sizes: LayerSizes) -> list[Bytes]:
    """The forward pass of experts: what is sent and received and a buffer for it, rows, those of width 2 F and a buffer, results.

    Room for what is kept is there from the beginning, so with further blocks behind the layers this can be the fullest moment.
    """
    if not run.mtp_blocks or not run.model.num_moe_layers:
        return []
    width = sizes.shape.rows * sum(sizes.expert_widths) / sizes.shape.tensor
    rows = (2 * sizes.shape.rows + 3 * sizes.shape.sent) * run.model.hidden_size
    return [parts(dispatch=(rows + 4 * width) * sizes.shape.width)]


def head_gradients(run: RunConfig, sizes: LayerSizes, layout: Layout, summed: Callable[[Iterable[ModelWeight]], Bytes]) -> Bytes:
    """Gradients that are there before the layers': of the head, once for each block of multi-token prediction too, and of those
    blocks. They wait whole for a sum with others over devices, but that of a single tied table in float32."""
    trained = trained_of(run)
    tables = [w for w in trained if w.path in ("embed/embedding", "lm_head/kernel")]
    if not run.mtp_blocks and run.model.tie_word_embeddings and sizes.shape.width == FLOAT:
        return summed(tables)
    # ZeRO 3 has taken a table's apart by then.
    table = 0 if splits_weights(layout) else run.model.vocab_size * run.model.hidden_size / sizes.shape.tensor
    blocks = sum(math.prod(w.shape) for w in trained if w.path.startswith("mtp/")) / sizes.shape.tensor
    return parts(gradients=((1 + run.mtp_blocks) * table * bool(tables) + blocks) * FLOAT)


def open_between(run: RunConfig, sizes: LayerSizes, layout: Layout, segments: Iterable[Segment]) -> Bytes:
    """Of segments of a single unit, which no loop keeps apart: their activations are there from the forward pass on, and where
    they are made again the compiler is free to do so before the backward pass of the layers behind them, and does. Also what
    the embedding gave."""
    total = parts(activations=2 * sizes.stream * sizes.wide)
    for segment in segments:
        if segment.repeats > 1:
            continue
        plan = remat_plan(remat_within(run.compute.remat, kinds_of(segment.unit, run.model)))
        for kind in segment.unit:
            total.update(open_layer(sizes, remade=not plan.everything))
            if plan.everything or sizes.shape.tensor == 1:
                # Between tensor shards a product waits for its gathered input, which keeps what is made again in its place.
                total.update(open_mlp(sizes, kind, remade=not plan.everything))
            if kind == "moe":
                total.update(open_experts(sizes) + expert_gradients(run, sizes, layout))
    return total


def unit_backward(run: RunConfig, sizes: LayerSizes, layout: Layout, unit: tuple[str, ...], *, branch: bool = False) -> list[Bytes]:
    """The fullest moments of the backward pass of one repetition of a unit, perhaps behind a branch, beside what is kept."""
    plan = remat_plan(remat_within(run.compute.remat, kinds_of(unit, run.model)))
    opened: Bytes = Counter()
    for _ in unit:
        opened.update(open_layer(sizes, remade=not plan.everything))
    moments = []
    for kind in dict.fromkeys(unit):
        if kind == "dense":
            moments.append(opened + mlp_backward(sizes, kind))
            continue
        gradients = expert_gradients(run, sizes, layout)
        kept = plan.everything or "expert_gate_up" in plan.saved
        full = not plan.everything and not plan.saved
        moments += [opened + gradients + moment for moment in expert_moments(sizes, kept=kept, full=full, branch=branch)]
    return moments


def embedding_gradient(run: RunConfig, sizes: LayerSizes) -> Bytes:
    """The table's gradient, to which tokens' are added, is whole on each device. Where ZeRO has parts of it and no tensor axis
    splits the vocabulary it is made after the layers' backward pass, else before, as zeros."""
    early = run.mesh.zero == 0 or sizes.shape.tensor > 1
    return parts(gradients=run.model.vocab_size * run.model.hidden_size * FLOAT if early else 0)
