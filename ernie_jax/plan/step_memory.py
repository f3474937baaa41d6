"""The moments of a step without pipeline stages that can be its fullest, in bytes of one device beside the step's arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ernie_jax.config.remat import remat_plan, remat_within
from ernie_jax.config.run import RunConfig
from ernie_jax.config.segments import Segment, segments_of
from ernie_jax.models.decoder import kinds_of
from ernie_jax.plan.activation_memory import (
    FLOAT,
    Bytes,
    LayerSizes,
    everything_bytes,
    kept_by_unit,
    mlp_backward,
    open_layer,
    open_mlp,
    parts,
    times,
)
from ernie_jax.plan.state_memory import Weight, elements, trained_of
from ernie_jax.plan.workspace import expert_gradients, expert_moments, loss_bytes
from ernie_jax.sharding import BATCH_AXES, Layout, make_layout


def step_moments(run: RunConfig, sizes: LayerSizes, layout: Layout, moments: Layout) -> list[Bytes]:
    """Of a run without stages."""
    segments = segments_of(run.model)
    scanned = [i for i, segment in enumerate(segments) if segment.repeats > 1]
    trained, moved = trained_of(run), elements(moments)

    def summed(weights: Iterable[Weight]) -> Bytes:
        return parts(gradients=sum(map(moved, weights)) * FLOAT)

    # Of stacks that a scan differentiates the sums are there from the beginning, as zeros.
    stacks = summed(w for w in trained if w.segment in scanned)
    # With several microbatches the step's sums too.
    carried = summed(trained) if run.parts > 1 else Counter()
    embeddings = [w for w in trained if w.path in ("embed/embedding", "lm_head/kernel")]
    head = summed(embeddings[-1:])
    kept: Bytes = Counter()
    for i in scanned:
        kept.update(times(segments[i].repeats, kept_by_unit(sizes, run.compute.remat, segments[i].unit)))
    between = open_between(run, sizes, segments) + carried + stacks + kept
    if run.parts > 1 and sizes.shape.tensor > 1:
        # The table, brought together once for all microbatches.
        between.update(parts(collectives=run.model.vocab_size * run.model.hidden_size * FLOAT))
    found = [between + loss_bytes(run, sizes, layout)]
    behind = head + embedding_gradient(run, sizes)
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
    for segment in segments:
        if segment.repeats == 1 and 0 not in scanned:
            found += [carried + summed(trained) + moment for moment in unit_backward(run, sizes, layout, segment.unit)]
    return found


def is_shared(weight: Weight, layout: Layout) -> bool:
    """Whether several batch shards have the same numbers of a weight, whose gradient they therefore sum."""
    used = {axis for name in weight.axes if name for axis in layout.rules.mesh_axes(name)}
    return layout.axis_size(*(axis for axis in BATCH_AXES if axis not in used)) > 1


def open_between(run: RunConfig, sizes: LayerSizes, segments: Iterable[Segment]) -> Bytes:
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
                total.update(parts(dispatch=everything_bytes(sizes, kind)["dispatch"]))
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
