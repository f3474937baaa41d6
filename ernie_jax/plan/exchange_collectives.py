"""What the exchange of tokens between experts' devices sends in one MoE layer, by dispatcher.

n tokens of a device, G devices of the expert axis, C rows of a peer's bucket, M slots of a row's list, K chosen, D model.
Formulas: `moe/dispatch`; results with G C rows come back from as many.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import jax.numpy as jnp

from ernie_jax.config.remat import RematPlan
from ernie_jax.moe.capacity import row_capacity
from ernie_jax.moe.dispatch import exchange_formats
from ernie_jax.moe.dispatch.packed_rows import packed_width
from ernie_jax.moe.exchange_parts import chunk_slices
from ernie_jax.parallel.quantized_rows import RowFormat, row_format
from ernie_jax.plan.communication import Communication
from ernie_jax.plan.step_sizes import StepSizes, Times, kept

EXPERT = ("expert",)
_SCOPE = "moe/moe_exchange"
_WORDS = {4: "u32", 2: "u16", 1: "u8"}


@dataclass(frozen=True)
class _Message:
    """One collective: kind, elements, dtype, and whether a policy that keeps what was received runs it only once."""

    kind: str
    axis: tuple[str, ...]
    elements: float
    dtype: str


@dataclass(frozen=True)
class _Exchange:
    """Of one layer: towards the experts, back, and the transposes of both."""

    there: tuple[_Message, ...]
    back: tuple[_Message, ...]
    gradients: tuple[_Message, ...]


def exchange(out: Communication, step: StepSizes, plan: RematPlan, times: Times, inner: bool) -> None:
    """Adds the exchange of one MoE layer.

    Args:
      out: to add to.
      step: sizes.
      plan: what the backward pass finds kept.
      times: how often it runs.
      inner: whether layers of the same unit follow, which need its result again.
    """
    again = 0.0 if kept(plan, "expert_received") else times.backwards
    results = times.backwards if inner and not kept(plan, "residual") else 0.0
    for each in _exchanges(step):
        for message in each.there:
            out.add(message.kind, message.axis, message.elements, message.dtype, times.forwards + again, f"{_SCOPE}/there")
        for message in each.back:
            out.add(message.kind, message.axis, message.elements, message.dtype, times.finished + results, f"{_SCOPE}/back")
        for message in each.gradients:
            out.add(message.kind, message.axis, message.elements, message.dtype, times.backwards, f"transpose/{_SCOPE}")


def _exchanges(step: StepSizes) -> Iterator[_Exchange]:
    run, moe, shards = step.run, step.run.model.moe, step.mesh["expert"]
    assert moe is not None
    if shards == 1:
        return
    sets = 1 if moe.vision_intermediate_size is None else 2
    own = moe.num_experts * sets // shards
    bucket: int | None = None
    if run.moe.capacity_factor is not None and run.batch_size % (run.parts * step.batch_shards) == 0:
        of_row = (row_capacity(run.seq_len, moe.num_experts, moe.num_experts_per_tok, run.moe.capacity_factor) + sets - 1) * (
            moe.num_experts // shards
        )
        bucket = step.rows * min(run.seq_len, of_row)
    times, experts = (1, own) if sets == 1 or run.moe.exchange_order == "together" else (sets, own // sets)
    for part in chunk_slices(step.tokens, run.moe.exchange_chunks):
        for _ in range(times):
            yield _of_chunk(step, part.stop - part.start, shards, experts, bucket)


def _of_chunk(step: StepSizes, tokens: int, shards: int, experts: int, bucket: int | None) -> _Exchange:
    """Of `tokens` tokens with `experts` experts a device."""
    moe = step.run.model.moe
    assert moe is not None
    name = "all_to_all" if step.run.moe.dispatch == "auto" else step.run.moe.dispatch
    if name == "replicated":
        return _replicated(step, tokens, shards)
    if name == "ragged":
        return _buckets(step, tokens, shards, experts, EXPERT, "ragged-all-to-all")
    rows = tokens if bucket is None else min(tokens, bucket)
    if name == "all_to_all":
        return _buckets(step, rows, shards, experts, EXPERT)
    nodes = step.run.moe.expert_nodes or 1
    each = shards // nodes
    # Between nodes each node is one peer, within one as many rows may come from each of them.
    crossing = tokens if bucket is None else min(tokens, each * bucket)
    arrived = nodes * crossing
    inside = arrived if bucket is None else min(arrived, nodes * bucket)
    parts = [_buckets(step, crossing, nodes, experts * each, EXPERT), _buckets(step, inside, each, experts, EXPERT)]
    first, second = (part for part in parts)
    return _Exchange((*first.there, *second.there), (*second.back, *first.back), (*first.gradients, *second.gradients))


def _buckets(step: StepSizes, rows: int, peers: int, experts: int, axis: tuple[str, ...], kind: str = "all-to-all") -> _Exchange:
    """Rows of a bucket to each of so many peers, with the lists of their experts there."""
    if peers == 1:
        return _Exchange((), (), ())
    run, moe, dim = step.run, step.run.model.moe, step.run.model.hidden_size
    assert moe is not None
    total, slots = peers * rows, min(moe.num_experts_per_tok, experts)
    formats = exchange_formats(run.moe.exchange_dtype, run.moe.exchange_backward)
    if formats is None:
        # Experts and weights of a row travel as float32, whatever the rows are.
        words, lists = _Message(kind, axis, total * dim, step.dtype), _Message(kind, axis, total * 2 * slots, "f32")
        return _Exchange((words, lists), (words,), (words, words, lists))
    forth, results, gradients = (_format(step, name) for name in (formats.rows, formats.results, formats.gradients))
    weights = slots * gradients.weights.itemsize // gradients.word.itemsize
    return _Exchange(
        (_packed(kind, axis, forth, total * packed_width(dim, slots, experts, forth)),),
        (_packed(kind, axis, results, total * results.width(dim)),),
        (
            _packed(kind, axis, gradients, total * (gradients.width(dim) + weights)),
            _packed(kind, axis, gradients, total * gradients.width(dim)),
        ),
    )


def _replicated(step: StepSizes, tokens: int, shards: int) -> _Exchange:
    """All tokens of the expert group gathered, results added and split."""
    run, moe, dim = step.run, step.run.model.moe, step.run.model.hidden_size
    assert moe is not None
    total, k = shards * tokens, moe.num_experts_per_tok
    results = _Message("reduce-scatter", EXPERT, total * dim, step.dtype)
    transposed = _Message("all-gather", EXPERT, total * dim, step.dtype)
    formats = exchange_formats(run.moe.exchange_dtype, run.moe.exchange_backward)
    if formats is None:
        there = (
            _Message("all-gather", EXPERT, total * dim, step.dtype),
            _Message("all-gather", EXPERT, total * k, "s32"),
            _Message("all-gather", EXPERT, total * k, step.dtype),
        )
        sums = (
            _Message("reduce-scatter", EXPERT, total * dim, step.dtype),
            _Message("reduce-scatter", EXPERT, total * k, step.dtype),
        )
        return _Exchange(there, (results,), (*sums, transposed))
    forth, gradients = _format(step, formats.rows), _format(step, formats.gradients)
    weights = k * gradients.weights.itemsize // gradients.word.itemsize
    return _Exchange(
        (_packed("all-gather", EXPERT, forth, total * packed_width(dim, k, moe.num_experts, forth)),),
        (results,),
        (_packed("all-to-all", EXPERT, gradients, total * (gradients.width(dim) + weights)), transposed),
    )


def _format(step: StepSizes, name: str) -> RowFormat:
    return row_format(name, jnp.dtype("float32" if step.dtype == "f32" else "bfloat16"))


def _packed(kind: str, axis: tuple[str, ...], row: RowFormat, words: float) -> _Message:
    return _Message(kind, axis, words, _WORDS[row.word.itemsize])
