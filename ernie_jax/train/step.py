"""One optimiser step: gradients, update, router bias, and what to report. B batch, T tokens, L MoE layers, E experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding

from ernie_jax.config.run import RunConfig
from ernie_jax.models import TextModel, abstract_model
from ernie_jax.moe import RouterBias, balance_rate, orthogonal_loss, update_bias
from ernie_jax.objectives import chunked_cross_entropy
from ernie_jax.objectives.pretraining import LossParts
from ernie_jax.sharding import Layout, variables_by_path
from ernie_jax.train.gradients import Batch, make_gradients, text_inputs_of
from ernie_jax.train.moe_layers import from_stacks, to_stacks
from ernie_jax.train.optimizer import Arrays, make_adamw, orthogonal_step
from ernie_jax.train.schedule import Schedule
from ernie_jax.train.state import TrainState, state_shardings, trained_values, with_values

Metrics = dict[str, Any]


def batch_sharding(layout: Layout) -> NamedSharding:
    """The sharding of every [B, T] array of a batch."""
    return layout.sharding(("batch", None), "a batch")


def make_train_step(run: RunConfig, layout: Layout) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The compiled step `(state, batch) -> (state, metrics)`; the given state's buffers are reused, so it must not be used again.

    `batch` holds `input_ids`, `labels`, `segment_ids`, `position_ids`, each [B, T] int32. A step whose loss or gradient is not
    finite leaves parameters, moments, biases and EMA as they were; `step` (so the schedule and the data) moves on all the same.

    Metrics are arrays on the devices, nothing is waited for: `loss` (cross-entropy a token), `total` (with router losses),
    `aux`, `z`, `orthogonal` (means over layers, without coefficients), `grad_norm` (before clipping), `lr`, `tokens`,
    `scored_tokens`, `skipped`, `skipped_in_a_row`, and under `router` for each MoE layer `load` [L, E], `entropy`, `dropped`,
    `balance`, `bias_min`, `bias_max`, `bias_std` [L].

    Raises:
      ValueError: a batch size that microbatches and devices do not split.
    """
    gradients = make_gradients(run, layout)
    schedule = Schedule(run.schedule, run.steps)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        with jax.named_scope("gradients"):
            grads, total, parts = gradients(state, batch)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(total) & jnp.isfinite(norm)
        rate = schedule(state.step)
        with jax.named_scope("update"):
            values, opt_state = _updated(run, state, grads, rate, finite)
            biases, ema = jax.tree.map(
                lambda a, b: jnp.where(finite, a, b),
                (_balanced(run, state.biases, parts), _averaged(run, state, values)),
                (state.biases, state.ema),
            )
            new = replace(state, params=with_values(state.params, values), biases=biases, opt_state=opt_state, ema=ema)
        bad = jnp.int32(~finite)
        new = replace(
            new, step=state.step + 1, skipped=state.skipped + bad, skipped_in_a_row=jnp.where(finite, 0, state.skipped_in_a_row + 1)
        )
        metrics = {
            "loss": parts.loss,
            "total": total,
            "aux": parts.aux,
            "z": parts.z,
            "grad_norm": norm,
            "lr": rate,
            "tokens": jnp.sum(batch["segment_ids"] != 0, dtype=jnp.float32),
            "scored_tokens": jnp.sum(batch["labels"] >= 0, dtype=jnp.float32),
            "skipped": new.skipped,
            "skipped_in_a_row": new.skipped_in_a_row,
            **_router_metrics(run, new, parts),
        }
        return new, metrics

    shardings = state_shardings(run, layout)
    return jax.jit(
        step, in_shardings=(shardings, batch_sharding(layout)), out_shardings=(shardings, layout.replicated), donate_argnums=0
    )


def make_eval_step(run: RunConfig, layout: Layout) -> Callable[[TrainState, Batch], tuple[jax.Array, jax.Array]]:
    """The compiled `(state, batch) -> (sum of the token losses, scored tokens)`, with the EMA weights where the run keeps them."""
    graphdef = nnx.split(abstract_model(run.model, run.compute, layout), nnx.Param, RouterBias)[0]

    def evaluate(state: TrainState, batch: Batch) -> tuple[jax.Array, jax.Array]:
        params = state.params if state.ema is None else with_values(state.params, state.ema)
        model: TextModel = nnx.merge(graphdef, params, state.biases)
        hidden, _ = model.hidden(text_inputs_of(batch))
        return chunked_cross_entropy(
            hidden, model.head_kernel, batch["labels"], model.dtypes, chunk=run.compute.loss_chunk, layout=layout
        )

    return jax.jit(evaluate, in_shardings=(state_shardings(run, layout), batch_sharding(layout)), out_shardings=layout.replicated)


def model_of(run: RunConfig, layout: Layout, state: TrainState) -> TextModel:
    """The model with a state's weights (of the EMA where the run keeps one); it shares the state's buffers."""
    graphdef = nnx.split(abstract_model(run.model, run.compute, layout), nnx.Param, RouterBias)[0]
    params = state.params if state.ema is None else with_values(state.params, state.ema)
    model: TextModel = nnx.merge(graphdef, params, state.biases)
    return model


def _updated(run: RunConfig, state: TrainState, grads: Arrays, rate: jax.Array, finite: jax.Array) -> tuple[Arrays, Any]:
    values = trained_values(run, state.params)
    values, opt_state = make_adamw(run.optimizer, list(values)).update(grads, state.opt_state, values, rate, finite)
    if run.moe.orthogonal_coef and run.moe.orthogonal_form == "step":
        values = orthogonal_step(values, jnp.where(finite, run.moe.orthogonal_coef, 0.0), run.moe.orthogonal_groups)
    return values, opt_state


def _balanced(run: RunConfig, biases: nnx.State, parts: LossParts) -> nnx.State:
    """The correction biases after the load of the whole step: all microbatches, all devices, once."""
    moe = run.moe
    if not parts.stats or not moe.bias_update_rate or moe.freeze_bias or moe.freeze_gate:
        return biases
    load = to_stacks(run.model, "router/bias", jnp.stack([s.load for s in parts.stats]))
    current = variables_by_path(biases)
    return with_values(biases, {path: update_bias(current[path].get_value(), load[path], moe.bias_update_rate) for path in load})


def _averaged(run: RunConfig, state: TrainState, values: Arrays) -> Arrays | None:
    """`E <- a E + (1 - a) theta` on the float32 weights, after each update."""
    decay = run.optimizer.ema_decay
    if state.ema is None or decay is None:
        return None
    return {path: decay * average + (1.0 - decay) * values[path] for path, average in state.ema.items()}


def _router_metrics(run: RunConfig, state: TrainState, parts: LossParts) -> Metrics:
    if not parts.stats:
        return {"orthogonal": jnp.float32(0.0), "router": {}}
    stats = jax.tree.map(lambda *layers: jnp.stack(layers), *parts.stats)
    by_path = {p: v.get_value() for s in (state.params, state.biases) for p, v in variables_by_path(s).items()}
    bias = from_stacks(run.model, "router/bias", by_path)
    gates = from_stacks(run.model, "router/gate", by_path)
    router = {
        "load": stats.load,
        "entropy": stats.entropy / jnp.maximum(stats.tokens, 1.0),
        "dropped": stats.dropped,
        "balance": balance_rate(stats.load),
        "bias_min": bias.min(-1),
        "bias_max": bias.max(-1),
        "bias_std": bias.std(-1),
    }
    return {"orthogonal": jnp.mean(orthogonal_loss(gates, run.moe.orthogonal_groups)), "router": router}
