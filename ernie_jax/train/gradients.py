"""Loss and gradient of one optimiser step over any number of microbatches. B batch, T tokens, A microbatches.

Everything is a sum over tokens divided by a count of the whole step, taken before the first backward pass, so the result
does not depend on A, on the mesh or on how documents are packed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ernie_jax.config.run import RunConfig
from ernie_jax.models import Batch, TextModel, abstract_model, inputs_of
from ernie_jax.models.batches import logical_axes_of
from ernie_jax.objectives.pretraining import LossParts, RouterLossWeights, TokenWeights, head_loss, pretraining_loss
from ernie_jax.objectives.step_totals import StepTotals
from ernie_jax.parallel import after
from ernie_jax.sharding import BATCH_AXES, Layout, constrain, use_layout
from ernie_jax.train.loss_scale import scaled, unscaled
from ernie_jax.train.optimizer import Arrays
from ernie_jax.train.pipeline import PipelinedGradients
from ernie_jax.train.state import TrainState, all_values, gradient_shardings, trained_values, with_values


def check_batch_size(batch_size: int, accumulate: int, layout: Layout) -> None:
    """Refuse a batch that microbatches and devices do not split evenly.

    Raises:
      ValueError: with the numbers.
    """
    shards = layout.axis_size(*BATCH_AXES)
    if batch_size % (accumulate * shards):
        axes = " x ".join(f"{axis}={layout.axis_size(axis)}" for axis in BATCH_AXES)
        parts = f"accumulate={accumulate} microbatches"
        if layout.mesh.shape["pipeline"] > 1:
            parts = f"{accumulate} microbatches (config.accumulate x config.pipeline.microbatches)"
        raise ValueError(
            f"batch_size={batch_size} cannot be split into {parts} over {axes} devices; "
            f"choose a multiple of {accumulate} x {shards} = {accumulate * shards}"
        )


def split_microbatches(batch: Batch, accumulate: int) -> Batch:
    """[B, T] -> [A, B / A, T]; microbatch a holds rows a, a + A, ...: each device splits the rows it already has.

    Of the groups of images, [S A, M, ...] -> [A, S, M, ...], likewise: group s A + a has the images of shard s in microbatch a.
    """

    def split(key: str, x: jax.Array) -> jax.Array:
        rows = x.reshape(x.shape[0] // accumulate, accumulate, *x.shape[1:])
        axes = (None, *logical_axes_of(key))
        return constrain(jnp.swapaxes(rows, 0, 1), *axes, *(None,) * (x.ndim + 1 - len(axes)))

    return {key: split(key, x) for key, x in batch.items()}


def make_gradients(run: RunConfig, layout: Layout) -> Callable[[TrainState, Batch], tuple[Arrays, jax.Array, LossParts]]:
    """A function (state, batch) -> (gradients by path, differentiated total, reported parts), for use inside jit.

    With `moe.balance_scope` `step`, the balance loss takes its frequencies from the whole step: under accumulation a forward
    pass over all microbatches counts choices first. With `microbatch` each takes its own, and the pass is saved.

    Raises:
      ValueError: a batch size that microbatches and devices do not split.
    """
    check_batch_size(run.batch_size, run.parts, layout)
    graphdef = nnx.split(abstract_model(run.model, run.compute, layout), nnx.Param, ...)[0]
    shardings = gradient_shardings(run, layout)
    weights, token_weights = loss_weights(run), token_weights_of(run)
    staged = PipelinedGradients.of(run, layout, weights, token_weights) if layout.mesh.shape["pipeline"] > 1 else None
    count_first = counts_first(run)

    def gradients(state: TrainState, batch: Batch) -> tuple[Arrays, jax.Array, LossParts]:
        def model_of(values: Arrays) -> TextModel:
            model: TextModel = nnx.merge(graphdef, with_values(state.params, values), state.biases)
            return model

        def loss(values: Arrays, part: Batch, totals: StepTotals) -> tuple[jax.Array, LossParts]:
            kinds = part.get("document_kinds")
            return pretraining_loss(model_of(values), inputs_of(part), part["labels"], totals, weights, token_weights, kinds)

        def scaled_loss(values: Arrays, part: Batch, totals: StepTotals) -> tuple[jax.Array, tuple[jax.Array, LossParts]]:
            total, parts = loss(values, part, totals)
            return scaled(total, state.loss_scale), (total, parts)

        def one(part: Batch) -> tuple[Arrays, jax.Array, LossParts]:
            grads, (total, parts) = jax.grad(scaled_loss, has_aux=True)(values, part, totals)
            return _placed(unscaled(grads, state.loss_scale), shardings), total, parts

        values = trained_values(run, state.params)
        kinds = batch.get("modality_ids"), batch.get("document_kinds")
        share = 1.0 if staged else 1.0 / run.parts
        totals = StepTotals.of(batch["labels"], batch["segment_ids"], *kinds, share=share, mtp_blocks=run.mtp_blocks)
        with use_layout(layout):
            parts = split_microbatches(after_totals(totals, batch), run.parts)
        if staged is not None:
            fixed = {path: value for path, value in all_values(state).items() if path not in values}
            result = staged(values, fixed, parts, totals, state.loss_scale, count_first=count_first)
            assert result.gradients is not None
            return _placed(result.gradients, shardings), result.total, result.parts
        if count_first:
            with jax.named_scope("count_choices"):
                totals = with_choices(totals, model_of(values), parts)
        return scan_sum(one, parts)

    return gradients


def counts_first(run: RunConfig) -> bool:
    """Whether a pass without gradients counts the choices of the whole step before the one with them: the balance loss takes its
    frequencies from several parts. With compressed gradients each data shard is a part of its own."""
    several = run.parts > 1 or run.optimizer.gradient_compression != "none"
    return several and run.moe.aux_loss_coef > 0 and run.moe.balance_scope == "step" and run.model.num_moe_layers > 0


def make_losses(run: RunConfig, layout: Layout) -> Callable[[TrainState, Batch], tuple[jax.Array, jax.Array]]:
    """A function (state, batch) -> (sums of the token losses [kinds], scored tokens [kinds]), for use inside jit, of batches of the
    size of one part of the accumulation; the kinds of documents are text alone and, of a vision-language model, with images."""
    weights, token_weights = RouterLossWeights(), TokenWeights()
    staged = PipelinedGradients.of(run, layout, weights, token_weights) if layout.mesh.shape["pipeline"] > 1 else None
    graphdef = nnx.split(abstract_model(run.model, run.compute, layout), nnx.Param, ...)[0]

    def losses(state: TrainState, batch: Batch) -> tuple[jax.Array, jax.Array]:
        kinds = batch.get("document_kinds")
        totals = StepTotals.of(batch["labels"], batch["segment_ids"], batch.get("modality_ids"), kinds)
        if staged is not None:
            with use_layout(layout):
                parts = split_microbatches(after_totals(totals, batch), run.microbatches)
            means = staged.forward({}, all_values(state), parts, totals).parts.modality_loss
        else:
            model: TextModel = nnx.merge(graphdef, state.params, state.biases)
            inputs = inputs_of(batch)
            stream, _ = model.stream(inputs)
            means = head_loss(model, stream, inputs, batch["labels"], totals, token_weights, kinds)[1].modality_loss
        scored = jnp.stack([modality.scored for modality in totals.modalities])
        return means * jnp.maximum(scored, 1.0), scored

    return losses


def loss_weights(run: RunConfig) -> RouterLossWeights:
    """Coefficients of the router losses in the differentiated total (the post-step form of orthogonality is not in it)."""
    moe = run.moe
    return RouterLossWeights(
        aux=moe.aux_loss_coef,
        z=moe.z_loss_coef,
        orthogonal=moe.orthogonal_coef if moe.orthogonal_form == "loss" else 0.0,
        orthogonal_groups=moe.orthogonal_groups,
        vision=run.loss.vision_router_weight,
    )


def token_weights_of(run: RunConfig) -> TokenWeights:
    """How labels count."""
    loss = run.loss
    return TokenWeights(
        text=loss.text_weight,
        multimodal=loss.multimodal_weight,
        token_balanced=loss.token_balanced,
        mtp=loss.mtp_weight if run.mtp_blocks else 0.0,
    )


def after_totals(totals: StepTotals, batch: Batch) -> Batch:
    """The same batch, but known only once the totals are: they are sums over devices, and loops with such sums follow."""
    ordered: Batch = after(batch, jnp.stack([jnp.sum(leaf) for leaf in jax.tree.leaves(totals)]), everywhere=True)
    return ordered


def with_choices(totals: StepTotals, model: TextModel, parts: Batch) -> StepTotals:
    """The totals with the choices of all microbatches, counted in a forward pass over them."""

    def choices(part: Batch) -> tuple[Any, Any]:
        _, routers = model.hidden(inputs_of(part))
        text = tuple(router.stats.top_k for router in routers)
        return text, tuple(router.vision.top_k for router in routers if router.vision is not None)

    return totals.with_choices(*jax.lax.stop_gradient(scan_sum(choices, parts)))


def _placed(grads: Arrays, shardings: dict[str, Any]) -> Arrays:
    # Summed in float32 where the moments live: under ZeRO-1 each data shard keeps and adds only its rows.
    return {path: jax.lax.with_sharding_constraint(g.astype(jnp.float32), shardings[path]) for path, g in grads.items()}


def scan_sum(function: Callable[[Batch], Any], parts: Batch) -> Any:
    """Sum of `function` over the leading axis of `parts`, one at a time."""
    if jax.tree.leaves(parts)[0].shape[0] == 1:
        # A loop of one round would still fill sums of the size of the gradients with zeros, and add to them.
        return function(jax.tree.map(lambda x: x[0], parts))
    first = jax.tree.map(lambda x: x[0], parts)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, first))
    total, _ = jax.lax.scan(lambda carry, part: (jax.tree.map(jnp.add, carry, function(part)), None), zeros, parts)
    return total
