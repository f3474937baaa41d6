"""What the exchange of tokens between experts' devices sends in one MoE layer, by dispatcher.

n tokens of a device, G devices of the expert axis, C rows of a peer's bucket, M slots of a row's list, K chosen, D model.
Formulas: `moe/dispatch`; results with G C rows come back from as many.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import jax.numpy as jnp

from ernie_jax.config.remat import RematPlan
from ernie_jax.moe.capacity import device_capacity
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
    """One collective over the expert axis, or over a part of it."""

    kind: str
    elements: float
    dtype: str
    part: tuple[str, int] | None = None

    def add(self, out: Communication, times: float, scope: str) -> None:
        """To `out`."""
        out.add(self.kind, EXPERT, self.elements, self.dtype, times, scope, self.part)


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
            message.add(out, times.forwards + again, f"{_SCOPE}/there")
        for message in each.back:
            message.add(out, times.finished + results, f"{_SCOPE}/back")
        for message in each.gradients:
            message.add(out, times.backwards, f"transpose/{_SCOPE}")


def _exchanges(step: StepSizes) -> Iterator[_Exchange]:
    run, moe, shards = step.run, step.run.model.moe, step.mesh["expert"]
    assert moe is not None
    if shards == 1:
        return
    sets = 1 if moe.vision_intermediate_size is None else 2
    own = moe.num_experts * sets // shards
    bucket: int | None = None
    if run.moe.capacity_factor is not None and run.batch_size % (run.parts * step.batch_shards) == 0:
        k, factor = moe.num_experts_per_tok, run.moe.capacity_factor
        of_row = device_capacity(run.seq_len, moe.num_experts, k, factor, shards=shards, sets=sets)
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
        # As many rows as could arrive, and back as many as could have been sent.
        returned = tokens * min(shards, moe.num_experts_per_tok)
        return _buckets(step, tokens, shards, experts, kind="ragged-all-to-all", returned=returned)
    rows = tokens if bucket is None else min(tokens, bucket)
    if name == "all_to_all":
        return _buckets(step, rows, shards, experts)
    nodes = step.run.moe.expert_nodes or 1
    each = shards // nodes
    # Between nodes each node is one peer, within one as many rows may come from each of them.
    crossing = tokens if bucket is None else min(tokens, each * bucket)
    arrived = nodes * crossing
    inside = arrived if bucket is None else min(arrived, nodes * bucket)
    first = _buckets(step, crossing, nodes, experts * each, ("outer", nodes))
    second = _buckets(step, inside, each, experts, ("inner", each))
    return _Exchange((*first.there, *second.there), (*second.back, *first.back), (*first.gradients, *second.gradients))


def _buckets(
    step: StepSizes,
    rows: int,
    peers: int,
    experts: int,
    part: tuple[str, int] | None = None,
    kind: str = "all-to-all",
    returned: int | None = None,
) -> _Exchange:
    """Rows of a bucket to each of so many peers, with the lists of their experts there."""
    if peers == 1:
        return _Exchange((), (), ())
    run, moe, dim = step.run, step.run.model.moe, step.run.model.hidden_size
    assert moe is not None
    total, slots = peers * rows, min(moe.num_experts_per_tok, experts)
    back = total if returned is None else returned
    formats = exchange_formats(run.moe.exchange_dtype, run.moe.exchange_backward)
    if formats is None:
        # Experts and weights of a row travel as float32, whatever the rows are.
        words, lists = (_Message(kind, total * width, of, part) for width, of in ((dim, step.dtype), (2 * slots, "f32")))
        home, weights = (_Message(kind, back * width, of, part) for width, of in ((dim, step.dtype), (2 * slots, "f32")))
        return _Exchange((words, lists), (home,), (words, home, weights))
    forth, results, gradients = (_format(step, name) for name in (formats.rows, formats.results, formats.gradients))
    of_weights = slots * gradients.weights.itemsize // gradients.word.itemsize
    return _Exchange(
        (_packed(kind, forth, total * packed_width(dim, slots, experts, forth), part),),
        (_packed(kind, results, back * results.width(dim), part),),
        (
            _packed(kind, gradients, back * (gradients.width(dim) + of_weights), part),
            _packed(kind, gradients, total * gradients.width(dim), part),
        ),
    )


def _replicated(step: StepSizes, tokens: int, shards: int) -> _Exchange:
    """All tokens of the expert group gathered, results added and split."""
    run, moe, dim = step.run, step.run.model.moe, step.run.model.hidden_size
    assert moe is not None
    total, k = shards * tokens, moe.num_experts_per_tok
    results = _Message("reduce-scatter", total * dim, step.dtype)
    transposed = _Message("all-gather", total * dim, step.dtype)
    formats = exchange_formats(run.moe.exchange_dtype, run.moe.exchange_backward)
    if formats is None:
        there = (
            _Message("all-gather", total * dim, step.dtype),
            _Message("all-gather", total * k, "s32"),
            _Message("all-gather", total * k, step.dtype),
        )
        sums = (
            _Message("reduce-scatter", total * dim, step.dtype),
            _Message("reduce-scatter", total * k, step.dtype),
        )
        return _Exchange(there, (results,), (*sums, transposed))
    forth, gradients = _format(step, formats.rows), _format(step, formats.gradients)
    weights = k * gradients.weights.itemsize // gradients.word.itemsize
    return _Exchange(
        (_packed("all-gather", forth, total * packed_width(dim, k, moe.num_experts, forth)),),
        (results,),
        (_packed("all-to-all", gradients, total * (gradients.width(dim) + weights)), transposed),
    )


def _format(step: StepSizes, name: str) -> RowFormat:
    return row_format(name, jnp.dtype("float32" if step.dtype == "f32" else "bfloat16"))


def _packed(kind: str, row: RowFormat, words: float, part: tuple[str, int] | None = None) -> _Message:
    return _Message(kind, words, _WORDS[row.word.itemsize], part)
