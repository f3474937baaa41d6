"""What the ends of a model communicate: the look-up of tokens, the head with its loss, and multi-token prediction.

N tokens of a microbatch, n of them on a device, b batch shards, t tensor shards, V vocabulary, D model. The table [V, D] is split
along V over `tensor`, with ZeRO 3 also along D over the batch axes. Outside a pipeline the partitioner chooses how to look up, by
the bytes that operand, indices and result would take: it gathers the table, or looks up in each part and adds, or moves rows
between a split of tokens and one of D.
"""

from __future__ import annotations

import math

from ernie_jax.plan.communication import TENSOR, Communication
from ernie_jax.plan.layer_collectives import layer, weight_uses
from ernie_jax.plan.model_weights import PlacedWeight
from ernie_jax.plan.step_sizes import StepSizes, Times

_TABLE = "embed/embedding"


def table_of(step: StepSizes) -> PlacedWeight:
    """The embedding."""
    return next(each for each in step.weights if each.weight.path == _TABLE)


def look_up(out: Communication, step: StepSizes, times: float, *, first: bool = True) -> None:
    """Adds look-ups of a microbatch's tokens, outside a pipeline; `first` of a pass, or after others in it."""
    model, t, shards = step.run.model, step.tensor, step.batch_shards
    vocabulary, tokens, x = model.vocab_size, step.tokens * shards, step.stream
    if _in_columns(step):
        # In parts of D, of all tokens; then back to parts of the tokens.
        out.sum(TENSOR, x, step.dtype, times, "embed")
        if t > 1:
            out.add("all-to-all", TENSOR, x / t, step.dtype, times, "embed")
        out.add("all-to-all", step.batch_axes, x / t, step.dtype, times, "embed")
        out.gather(step.batch_axes, tokens, "s32", times, "embed")
    elif _in_parts(step):
        out.sum_split(TENSOR, x, step.dtype, times, "embed")
        out.add("collective-permute", (*_last_batch_axis(step), *TENSOR), x / t, step.dtype, times if t > 1 else 0, "embed")
    else:
        # The same for all microbatches, so it is brought together once a pass, before their loop.
        once, table = float(first), table_of(step)
        out.gather(table.gathered_over, table.used, "f32", once, "embed")
        out.gather(TENSOR, vocabulary * model.hidden_size, "f32", once, "embed")


def look_up_backward(out: Communication, step: StepSizes, times: float) -> None:
    """Adds the table's gradients, outside a pipeline."""
    model, t, shards = step.run.model, step.tensor, step.batch_shards
    vocabulary, tokens, x = model.vocab_size, step.tokens * shards, step.stream
    table = vocabulary * model.hidden_size
    split = table_of(step).moments
    # The smaller of the two travels: rows of tokens, to the devices that keep a part of D, or the table of each device.
    rows_move = split > 1 and step.tokens < vocabulary
    if rows_move:
        out.gather(TENSOR, x, step.dtype, times, "transpose/embed")
        out.add("all-to-all", step.batch_axes, x, step.dtype, times, "transpose/embed")
        out.gather(step.batch_axes, tokens, "s32", times, "transpose/embed")
        out.sum(TENSOR, table / split, "f32", times, "transpose/embed")
    elif _in_parts(step):
        out.add(
            "collective-permute", (*_last_batch_axis(step), *TENSOR), x / t, step.dtype, times if t > 1 else 0, "transpose/embed"
        )
        out.gather(TENSOR, x, step.dtype, times, "transpose/embed")
        for axis in step.batch_axes:
            out.sum((axis,), table / t, "f32", times, "transpose/embed")
    else:
        out.sum(TENSOR, table, "f32", times, "transpose/embed")
        add = out.sum_split if split > 1 else out.sum
        add(step.batch_axes, table, "f32", times, "transpose/embed")


def look_up_in_stage(out: Communication, step: StepSizes, forwards: float, backwards: float) -> None:
    """Adds look-ups of a pipeline's first stage, and gradients of the table.

    There tokens and table are constrained: each tensor shard looks up all tokens in its rows, and the gradient adds the cotangents
    of all tokens on each device. Without tensor shards both concern only the columns that ZeRO keeps on a device.
    """
    x, tokens = step.stream, step.tokens * step.batch_shards
    out.sum_split(TENSOR, x, step.dtype, forwards, "embed")
    out.gather(TENSOR, x, step.dtype, backwards, "transpose/embed")
    table = table_of(step)
    if step.tensor == 1 and table.moments > 1:
        out.add("all-to-all", step.batch_axes, x, step.dtype, backwards, "transpose/embed")
    else:
        out.gather(step.batch_axes, tokens * step.run.model.hidden_size, step.dtype, backwards, "transpose/embed")
    out.gather(step.batch_axes, tokens, "s32", backwards, "transpose/embed")
    if step.tensor == 1 and table.gathered > 1:
        out.add("all-to-all", step.batch_axes, x, step.dtype, forwards, "embed")
    else:
        out.gather(table.gathered_over, table.used, "f32", forwards, "embed")


def head(out: Communication, step: StepSizes, times: float) -> None:
    """Adds passes of the head over a microbatch, forward and backward together, a chunk of the loss at a time."""
    run, kernel = step.run, head_kernel(step)
    pieces = max(1, math.ceil(step.tokens / run.loss_chunk))
    width = math.ceil(run.seq_len / pieces)
    pieces = math.ceil(run.seq_len / width)
    padded = step.rows * pieces * width
    out.gather(TENSOR, step.stream, step.dtype, times, "head")
    # Largest logit, sum of exponentials and the label's logit of each token.
    out.sum(TENSOR, 3 * padded, "f32", times, "head_and_loss")
    out.sum(TENSOR, padded * run.model.hidden_size, step.dtype, times, "head_and_loss")
    # The kernel's gradient is summed over the batch anew in each piece, since the loop carries it whole.
    out.sum(step.batch_axes, kernel.used, "f32", times * pieces, "head_and_loss")
    out.gather(kernel.gathered_over, kernel.used, step.dtype, times, "head_and_loss")


def head_kernel(step: StepSizes) -> PlacedWeight:
    """The matrix that makes logits."""
    wanted = _TABLE if step.run.model.tie_word_embeddings else "lm_head/kernel"
    return next(each for each in step.weights if each.weight.path == wanted)


def further_tokens(out: Communication, step: StepSizes, times: float, *, in_stage: bool) -> None:
    """Adds the blocks of multi-token prediction, each with a look-up and a head of its own."""
    blocks = step.run.mtp_blocks
    if not blocks:
        return
    runs = times * blocks
    if in_stage:
        look_up_in_stage(out, step, runs, runs)
    else:
        look_up(out, step, runs, first=False)
        look_up_backward(out, step, runs)
    own = [each for each in step.weights if each.weight.path.startswith("mtp/")]
    within = [each for each in own if "/layer/" in each.weight.path]
    layer(out, step, "dense", within, step.plan_of(("dense",)), Times(runs, runs))
    rest = [each for each in own if each not in within]
    weight_uses(out, step, rest, Times(runs, runs))
    head(out, step, runs)


def _in_columns(step: StepSizes) -> bool:
    """Whether all tokens are looked up in each part of D, as ZeRO 3 keeps them."""
    table, tokens = table_of(step), step.tokens * step.batch_shards
    vocabulary, split, t = step.run.model.vocab_size, table.gathered, step.tensor
    return split > 1 and vocabulary / (t * split) + tokens / split < vocabulary + tokens / (step.batch_shards * t)


def _in_parts(step: StepSizes) -> bool:
    """Whether tokens are looked up in each part of the vocabulary, instead of in a table brought together."""
    vocabulary, t = step.run.model.vocab_size, step.tensor
    tokens = step.tokens * step.batch_shards
    return t > 1 and vocabulary / t + tokens < vocabulary + tokens / (step.batch_shards * t)


def _last_batch_axis(step: StepSizes) -> tuple[str, ...]:
    return tuple(axis for axis in step.batch_axes if step.mesh[axis] > 1)[-1:]
