"""One optimiser step: gradients, update, router bias, and what to report. B batch, T tokens, L MoE layers, E experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from ernie_jax.config.run import RunConfig
from ernie_jax.models import Batch, TextModel, abstract_model, batch_shardings
from ernie_jax.moe import FP8_OPERANDS, RouterStats, balance_rate, gate_cosine, orthogonal_loss, update_bias
from ernie_jax.moe.balance import device_load
from ernie_jax.moe.places import own_places
from ernie_jax.objectives.pretraining import LossParts
from ernie_jax.sharding import Layout, variables_by_path
from ernie_jax.train.compressed_gradients import make_compressed_gradients
from ernie_jax.train.gradients import make_gradients, make_losses
from ernie_jax.train.moe_layers import EXPERTS_OF, from_stacks, moe_stacks, to_stacks
from ernie_jax.train.optimizer import Arrays, make_adamw, orthogonal_step
from ernie_jax.train.schedule import Schedule
from ernie_jax.train.state import TrainState, state_shardings, trained_values, with_values

Metrics = dict[str, Any]

# The routers of a MoE layer, in the order of the modalities in what is reported.
_ROUTERS = tuple(EXPERTS_OF)


def make_train_step(run: RunConfig, layout: Layout) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The compiled step `(state, batch) -> (state, metrics)`; the given state's buffers are reused, so it must not be used again.

    `batch` holds `input_ids`, `labels`, `segment_ids`, `position_ids`, each [B, T] int32; of a vision-language model, the arrays of
    `models.batches.MULTIMODAL_KEYS`. A step whose loss or gradient is not finite leaves parameters, moments, biases and EMA as
    they were; `step` (so the schedule and the data) moves on all the same.

    Metrics are arrays on the devices, nothing is waited for: `loss` (cross-entropy a token), `total` (with router losses),
    `aux`, `z`, `orthogonal` (means over layers, without coefficients), `grad_norm` (before clipping), `lr`, `tokens`,
    `scored_tokens`, `skipped`, `skipped_in_a_row`, and under `router` for each MoE layer `load` [L, E], `entropy`, `dropped`,
    `balance`, `bias_min`, `bias_max`, `bias_std`, `gate_cosine` [L], and where experts are split over G devices `device_load`
    [L, G], `device_balance` and `node_balance` [L], as the experts stood in this step; with FP8 also `fp8_overflow_gate_up`,
    `fp8_overflow_down`, `fp8_underflow_gate_up`, `fp8_underflow_down` [L]: the share of the numbers of that product's input that
    saturated, and of those other than zero that became zero. With a loss scale there is `loss_scale`, as the step had it. Of a
    vision-language model the router figures are of the text experts, and there are `loss_text` and `loss_multimodal`
    (cross-entropy a label in documents of text alone, and with images),
    `aux_vision`, `z_vision`, `orthogonal_vision`, `vision_tokens`, `patches`, and `vision_router`.

    Raises:
      ValueError: a batch size that microbatches and devices do not split, a pattern of `trainable` that names nothing.
    """
    compressed = run.optimizer.gradient_compression != "none"
    gradients: Callable[..., Any] = (make_compressed_gradients if compressed else make_gradients)(run, layout)
    schedule = Schedule(run.schedule, run.steps)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        with jax.named_scope("gradients"):
            # Under compression also what the data shards hold back.
            grads, total, parts, *held = gradients(state, batch)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(total) & jnp.isfinite(norm)
        rate = schedule(state.step)
        with jax.named_scope("update"):
            values, opt_state = _updated(run, layout, state, grads, rate, finite)
            biases, ema = jax.tree.map(
                lambda a, b: jnp.where(finite, a, b),
                (_balanced(run, state, parts), _averaged(run, state, values)),
                (state.biases, state.ema),
            )
            new = replace(state, params=with_values(state.params, values), biases=biases, opt_state=opt_state, ema=ema)
            new = replace(new, expert_load=_counted(state, parts, finite))
            if held:
                new = replace(new, held=jax.tree.map(lambda a, b: jnp.where(finite, a, b), held[0], state.held))
        bad = jnp.int32(~finite)
        new = replace(
            new, step=state.step + 1, skipped=state.skipped + bad, skipped_in_a_row=jnp.where(finite, 0, state.skipped_in_a_row + 1)
        )
        if state.loss_scale is not None:
            new = replace(new, loss_scale=state.loss_scale.after(finite, run.optimizer.loss_scale_growth))
        metrics = {
            "loss": parts.loss,
            "total": total,
            "grad_norm": norm,
            "lr": rate,
            "tokens": jnp.sum(batch["segment_ids"] != 0, dtype=jnp.float32),
            "scored_tokens": jnp.sum(batch["labels"] >= 0, dtype=jnp.float32),
            "skipped": new.skipped,
            "skipped_in_a_row": new.skipped_in_a_row,
            # The one this step was taken with.
            **({} if state.loss_scale is None else {"loss_scale": state.loss_scale.scale}),
            **_modality_metrics(run, layout, batch, new, parts),
        }
        return new, metrics

    shardings = state_shardings(run, layout)
    batch_in = batch_shardings(layout, multimodal=run.model.vision is not None)
    return jax.jit(step, in_shardings=(shardings, batch_in), out_shardings=(shardings, layout.replicated), donate_argnums=0)


def make_eval_step(run: RunConfig, layout: Layout) -> Callable[[TrainState, Batch], tuple[jax.Array, jax.Array]]:
    """The compiled `(state, batch) -> (sums of the token losses [kinds], scored tokens [kinds])`, with the EMA weights where the
    run keeps them; the kinds of documents are text alone and, of a vision-language model, with images."""
    losses = make_losses(run, layout)

    def evaluate(state: TrainState, batch: Batch) -> tuple[jax.Array, jax.Array]:
        averaged = state if state.ema is None else replace(state, params=with_values(state.params, state.ema))
        return losses(averaged, batch)

    batch_in = batch_shardings(layout, multimodal=run.model.vision is not None)
    return jax.jit(evaluate, in_shardings=(state_shardings(run, layout), batch_in), out_shardings=layout.replicated)


def model_of(run: RunConfig, layout: Layout, state: TrainState) -> TextModel:
    """The model with a state's weights (of the EMA where the run keeps one); it shares the state's buffers."""
    graphdef = nnx.split(abstract_model(run.model, run.compute, layout), nnx.Param, ...)[0]
    params = state.params if state.ema is None else with_values(state.params, state.ema)
    model: TextModel = nnx.merge(graphdef, params, state.biases)
    return model


def _updated(
    run: RunConfig, layout: Layout, state: TrainState, grads: Arrays, rate: jax.Array, finite: jax.Array
) -> tuple[Arrays, Any]:
    values = trained_values(run, state.params)
    optimizer = make_adamw(run.optimizer, list(values), alone=layout.mesh.size == 1)
    values, opt_state = optimizer.update(grads, state.opt_state, values, rate, finite)
    if run.moe.orthogonal_coef and run.moe.orthogonal_form == "step":
        values = orthogonal_step(values, jnp.where(finite, run.moe.orthogonal_coef, 0.0), run.moe.orthogonal_groups)
    return values, opt_state


def _balanced(run: RunConfig, state: TrainState, parts: LossParts) -> nnx.State:
    """The correction biases after the load of the whole step: all microbatches, all devices, once.

    The bias of a gate that is not trained stays too.
    """
    moe, biases = run.moe, state.biases
    if not moe.bias_update_rate or moe.freeze_bias:
        return biases
    trained, current = trained_values(run, state.params), variables_by_path(biases)
    new: Arrays = {}
    for name, stats in zip(_ROUTERS, (parts.stats, parts.vision_stats), strict=True):
        if not stats:
            continue
        load = to_stacks(run.model, f"{name}/bias", jnp.stack([s.load for s in stats]))
        for stack in moe_stacks(run.model):
            path = f"{stack.path}/{name}/bias"
            if f"{stack.path}/{name}/gate" in trained:
                new[path] = update_bias(current[path].get_value(), load[path], moe.bias_update_rate)
    return with_values(biases, new)


def _counted(state: TrainState, parts: LossParts, finite: jax.Array) -> Arrays:
    """The load since experts were last placed, with that of this step."""
    loads = {name: stats for name, stats in zip(_ROUTERS, (parts.stats, parts.vision_stats), strict=True) if stats}
    return {
        name: before + jnp.where(finite, jnp.stack([s.load for s in loads[name]]), 0.0) if name in loads else before
        for name, before in state.expert_load.items()
    }


def _averaged(run: RunConfig, state: TrainState, values: Arrays) -> Arrays | None:
    """`E <- a E + (1 - a) theta` on the float32 weights, after each update."""
    decay = run.optimizer.ema_decay
    if state.ema is None or decay is None:
        return None
    return {path: decay * average + (1.0 - decay) * values[path] for path, average in state.ema.items()}


def _modality_metrics(run: RunConfig, layout: Layout, batch: Batch, state: TrainState, parts: LossParts) -> Metrics:
    metrics: Metrics = {}
    for i, suffix in zip(range(len(parts.aux)), ("", "_vision"), strict=False):
        metrics |= {f"aux{suffix}": parts.aux[i], f"z{suffix}": parts.z[i]}
        groups = 1 if i else run.moe.orthogonal_groups
        stats = parts.vision_stats if i else parts.stats
        metrics[f"orthogonal{suffix}"], metrics[_ROUTERS[i]] = _router_metrics(run, layout, _ROUTERS[i], groups, state, stats)
    if parts.mtp is not None:
        metrics["loss_mtp"] = parts.mtp
    if "modality_ids" in batch:
        vision = (batch["modality_ids"] != 0) & (batch["segment_ids"] != 0)
        metrics |= {
            "loss_text": parts.modality_loss[0],
            "loss_multimodal": parts.modality_loss[1],
            "vision_tokens": jnp.sum(vision, dtype=jnp.float32),
            "patches": jnp.sum(batch["patch_segment_ids"] != 0, dtype=jnp.float32),
        }
    return metrics


def _router_metrics(
    run: RunConfig, layout: Layout, name: str, groups: int, state: TrainState, layers: Sequence[RouterStats]
) -> tuple[jax.Array, Metrics]:
    """(orthogonal loss, figures by layer) of the routers of one modality."""
    if not layers:
        return jnp.float32(0.0), {}
    stats = jax.tree.map(lambda *values: jnp.stack(values), *layers)
    by_path = {p: v.get_value() for s in (state.params, state.biases) for p, v in variables_by_path(s).items()}
    bias = from_stacks(run.model, f"{name}/bias", by_path)
    gates = from_stacks(run.model, f"{name}/gate", by_path)
    figures = {
        "load": stats.load,
        "entropy": stats.entropy / jnp.maximum(stats.tokens, 1.0),
        "dropped": stats.dropped,
        "balance": balance_rate(stats.load),
        "bias_min": bias.min(-1),
        "bias_max": bias.max(-1),
        "bias_std": bias.std(-1),
        "gate_cosine": gate_cosine(gates),
    }
    devices = layout.shards("expert")
    if devices > 1:
        places = own_places(bias.shape[-1], len(layers))
        if run.compute.movable_experts:
            places = from_stacks(run.model, f"{EXPERTS_OF[name]}/place", by_path)
        on_device = device_load(stats.load, places, devices)
        on_node = on_device.reshape(len(layers), run.moe.placement_nodes, -1).sum(-1)
        figures |= {"device_load": on_device, "device_balance": balance_rate(on_device), "node_balance": balance_rate(on_node)}
    if stats.fp8 is not None:
        for name, shares in (("overflow", stats.fp8.overflow), ("underflow", stats.fp8.underflow)):
            figures |= {f"fp8_{name}_{operand}": share for operand, share in zip(FP8_OPERANDS, shares.T, strict=True)}
    return jnp.mean(orthogonal_loss(gates, groups)), figures
