"""Gradients of an optimiser step summed over the data shards with few bytes on the wire (see `parallel.compressed`).

A data shard is one more part of the step, as a microbatch is: losses are divided by counts of the whole step, so what the shards
give adds up, whatever is rounded on the way. Over the expert and tensor axes a shard is laid out as the model is anywhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from ernie_jax.config.run import RunConfig
from ernie_jax.models import Batch, TextModel, abstract_model, inputs_of
from ernie_jax.objectives.pretraining import LossParts, pretraining_loss
from ernie_jax.objectives.step_totals import StepTotals
from ernie_jax.parallel import Compression, Held, check_sums_over_data, make_compression, model_axes, summed_over_data_shards
from ernie_jax.sharding import Layout, use_layout
from ernie_jax.train.gradients import (
    after_totals,
    check_batch_size,
    counts_first,
    loss_weights,
    scan_sum,
    split_microbatches,
    token_weights_of,
    with_choices,
)
from ernie_jax.train.loss_scale import scaled, unscaled
from ernie_jax.train.optimizer import Arrays
from ernie_jax.train.state import TrainState, gradient_shardings, parameter_specs, trained_values, with_values

CompressedGradients = Callable[[TrainState, Batch], tuple[Arrays, jax.Array, LossParts, Held]]


def make_compressed_gradients(run: RunConfig, layout: Layout) -> CompressedGradients:
    """As `make_gradients`, with what the shards hold back for the next step as a fourth result.

    The balance loss takes its frequencies from the whole step by a forward pass over it first, or, with `moe.balance_scope`
    `microbatch`, from each shard's part of a microbatch.

    Raises:
      ValueError: a batch size that microbatches and devices do not split; a mesh with pipeline stages or parameters
        split over its data axis.
    """
    check_sums_over_data(layout)
    check_batch_size(run.batch_size, run.parts, layout)
    compression = compression_of(run)
    assert compression is not None
    # Within a shard of one device nothing is laid out over a mesh; the forward pass that counts choices is, as ever.
    within = layout if model_axes(layout) else None
    inside, outside = (nnx.split(abstract_model(run.model, run.compute, at), nnx.Param, ...)[0] for at in (within, layout))
    shardings = gradient_shardings(run, layout)
    weights, token_weights = loss_weights(run), token_weights_of(run)
    shards = layout.axis_size("data")

    def gradients(state: TrainState, batch: Batch) -> tuple[Arrays, jax.Array, LossParts, Held]:
        def scaled_loss(
            values: Arrays, part: Batch, whole: tuple[TrainState, StepTotals]
        ) -> tuple[jax.Array, tuple[jax.Array, LossParts]]:
            state, totals = whole
            model: TextModel = nnx.merge(inside, with_values(state.params, values), state.biases)
            total, reported = pretraining_loss(model, inputs_of(part), part["labels"], totals, weights, token_weights)
            return scaled(total, state.loss_scale), (total, reported)

        def shard(whole: tuple[TrainState, StepTotals], parts: Batch) -> tuple[Arrays, tuple[jax.Array, LossParts]]:
            values = trained_values(run, whole[0].params)

            def one(part: Batch) -> tuple[Arrays, tuple[jax.Array, LossParts]]:
                grads, reported = jax.grad(scaled_loss, has_aux=True)(values, part, whole)
                # What is held back for later steps is of the loss, whose scale may be another by then.
                grads = unscaled(grads, whole[0].loss_scale)
                return jax.tree.map(lambda g: g.astype(jnp.float32), grads), reported

            summed: tuple[Arrays, tuple[jax.Array, LossParts]] = scan_sum(one, parts)
            return summed

        assert state.held is not None
        share = 1.0 / (run.parts * shards)
        totals = StepTotals.of(batch["labels"], batch["segment_ids"], share=share, mtp_blocks=run.mtp_blocks)
        with use_layout(layout):
            parts = split_microbatches(after_totals(totals, batch), run.parts)
        if counts_first(run):
            with jax.named_scope("count_choices"):
                totals = with_choices(totals, nnx.merge(outside, state.params, state.biases), parts)
        needed = replace(state, opt_state=None, ema=None, held=None, expert_load={})
        specs = parameter_specs(run, state.params, layout)
        grads, (total, reported), held = summed_over_data_shards(
            shard, (needed, totals), parts, state.held, specs, layout, compression
        )
        placed = {path: jax.lax.with_sharding_constraint(g, shardings[path]) for path, g in grads.items()}
        return placed, total, reported, held

    return gradients


def compression_of(run: RunConfig) -> Compression | None:
    """How the run's gradients are summed; None for as they are."""
    name = run.optimizer.gradient_compression
    return None if name == "none" else make_compression(name, run.optimizer.gradient_fraction)
