"""Everything a training run carries from step to step, and where each part of it lives.

Parameters follow the layout's rules. With ZeRO-1 the optimiser moments and the EMA are sharded further, by the `fsdp` table;
with ZeRO-3 the layout itself is `fsdp`, so the parameters are too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ernie_jax.config.run import RunConfig
from ernie_jax.config.trainable import trained_paths
from ernie_jax.models import TextModel, abstract_model, build_model, run_once_options
from ernie_jax.parallel import Held, held_specs, make_compression, nothing_held_by_shards
from ernie_jax.sharding import Layout, logical_axes, make_layout, make_mesh, map_variables, variables_by_path
from ernie_jax.sharding import state_shardings as variable_shardings
from ernie_jax.train.loss_scale import LossScale
from ernie_jax.train.optimizer import Arrays, is_gate, make_adamw

# Gradients with fewer elements on a device travel as they are: norms, whose bytes are nothing.
LEAST_COMPRESSED = 1024


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """State of a run after `step` steps.

    Attributes:
      step: int32, steps taken, each over one batch; a skipped step counts, so data and schedule stay where they would be.
      params: the trained weights, float32.
      biases: router correction biases, float32, and where each expert stands, in a run that moves experts; outside the optimiser
        altogether.
      opt_state: AdamW's moments of the parameters that are not frozen, by path.
      ema: running average of the trained parameters by path, None without.
      skipped: int32, steps whose loss or gradient was not finite; they changed nothing but the counters.
      skipped_in_a_row: int32, how many of the latest steps those were.
      expert_load: in a run that moves experts, `router` (and `vision_router`) -> [L, E] float32, tokens of each expert since they
        were last placed.
      loss_scale: the factor on the loss, None without.
      held: by path, what each data shard has held back of its gradients [data shards, ...], laid out over the other axes of the
        mesh as the parameters are; None without compression.
    """

    step: jax.Array
    params: nnx.State
    biases: nnx.State
    opt_state: Any
    ema: Arrays | None
    skipped: jax.Array
    skipped_in_a_row: jax.Array
    expert_load: Arrays = field(default_factory=dict)
    loss_scale: LossScale | None = None
    held: Held | None = None


def mesh_of(run: RunConfig) -> Mesh:
    """The mesh a run asks for, over the devices JAX finds."""
    m = run.mesh
    return make_mesh(data=m.data, tensor=m.tensor, pipeline=m.pipeline, expert=m.expert)


def run_layout(run: RunConfig, mesh: Mesh) -> Layout:
    """The layout of a run's parameters and activations on `mesh`, with every size checked."""
    return make_layout(mesh, run.model, run.mesh.rules)


def moment_layout(run: RunConfig, layout: Layout) -> Layout:
    """The layout of optimiser moments, gradients being summed, and EMA."""
    return make_layout(layout.mesh, run.model, "fsdp") if run.mesh.zero == 1 else layout


def trained_values(run: RunConfig, params: nnx.State) -> Arrays:
    """`path -> array` of the parameters that are not frozen (by `trainable`, or gates by `moe.freeze_gate`).

    Raises:
      ValueError: a pattern of `trainable` that names no parameter.
    """
    variables = variables_by_path(params)
    trained = trained_paths(variables, run.trainable)
    return {path: variables[path].get_value() for path in trained if not (run.moe.freeze_gate and is_gate(path))}


def all_values(state: TrainState) -> Arrays:
    """`path -> array` of all parameters and biases."""
    return {path: v.get_value() for part in (state.params, state.biases) for path, v in variables_by_path(part).items()}


def with_values(state: nnx.State, values: Mapping[str, Any]) -> nnx.State:
    """`state` with the variables of these paths holding these values."""
    new: nnx.State = map_variables(lambda path, variable: values.get(path, variable.get_value()), state)
    return new


def new_state(run: RunConfig, params: nnx.State, biases: nnx.State, layout: Layout) -> TrainState:
    """The state of step 0 around given weights (their arrays are shared, not copied, except by the EMA)."""
    values = trained_values(run, params)

    def zero() -> jax.Array:
        return jnp.zeros((), jnp.int32)

    return TrainState(
        step=zero(),
        params=params,
        biases=biases,
        opt_state=make_adamw(run.optimizer, list(values)).init(values),
        ema=None if run.optimizer.ema_decay is None else jax.tree.map(jnp.copy, values),
        skipped=zero(),
        skipped_in_a_row=zero(),
        expert_load=no_load(run),
        loss_scale=LossScale.initial(run.optimizer),
        held=_nothing_held(run, values, parameter_specs(run, params, layout), layout),
    )


def no_load(run: RunConfig) -> Arrays:
    """`TrainState.expert_load` before the first step, and after each placement."""
    moe = run.model.moe
    if moe is None or not run.moe.placement_every:
        return {}
    routers = ("router",) if moe.vision_intermediate_size is None else ("router", "vision_router")
    return {name: jnp.zeros((run.model.num_moe_layers, moe.num_experts), jnp.float32) for name in routers}


def abstract_state(run: RunConfig, layout: Layout) -> TrainState:
    """The state as ShapeDtypeStructs, each with the sharding it is to have: what a restore is asked for."""
    shapes = _shapes(run, layout)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, _shardings_of(run, layout, shapes))


def state_shardings(run: RunConfig, layout: Layout) -> TrainState:
    """A TrainState that holds a NamedSharding in place of each array."""
    return _shardings_of(run, layout, _shapes(run, layout))


def init_state(run: RunConfig, layout: Layout) -> TrainState:
    """A fresh state, each array created on the devices that hold it; the values depend on the seed, not on the mesh."""

    def create() -> TrainState:
        model = build_model(run.model, run.compute, layout, nnx.Rngs(run.seed))
        return new_state(run, *_split(model), layout)

    state: TrainState = jax.jit(create, out_shardings=state_shardings(run, layout), compiler_options=run_once_options())()
    return state


def gradient_shardings(run: RunConfig, layout: Layout) -> dict[str, NamedSharding]:
    """The sharding by path of a gradient while it is summed, which is that of its moments."""
    params, _ = _split(abstract_model(run.model, run.compute, layout))
    where = moment_layout(run, layout)
    variables = variables_by_path(params)
    return {path: where.sharding(logical_axes(variables[path]), f"moments of {path}") for path in trained_values(run, params)}


def parameter_specs(run: RunConfig, params: nnx.State, layout: Layout) -> dict[str, PartitionSpec]:
    """By path of the parameters that are trained, over which axes of the mesh each of their dimensions is split."""
    variables = variables_by_path(params)
    return {path: layout.spec(logical_axes(variables[path]), f"parameter {path}") for path in trained_values(run, params)}


def _split(model: TextModel) -> tuple[nnx.State, nnx.State]:
    """(parameters, router biases and whatever else is not trained) of a model."""
    states: Any = nnx.split(model, nnx.Param, ...)
    return states[1], states[2]


def _shapes(run: RunConfig, layout: Layout) -> TrainState:
    weights = _split(abstract_model(run.model, run.compute, layout))
    state: TrainState = jax.eval_shape(lambda p, b: new_state(run, p, b, layout), *weights)
    return state


def _shardings_of(run: RunConfig, layout: Layout, shapes: TrainState) -> TrainState:
    by_path = gradient_shardings(run, layout)

    def follow(path: tuple[Any, ...], _: Any) -> NamedSharding:
        # Moments sit in optax's tuples under the parameter's path; counters have no such key.
        return by_path.get(str(getattr(path[-1], "key", "")), layout.replicated)

    whole: Any = layout.replicated
    return TrainState(
        step=whole,
        params=variable_shardings(shapes.params, layout),
        biases=variable_shardings(shapes.biases, layout),
        opt_state=jax.tree_util.tree_map_with_path(follow, shapes.opt_state),
        ema=jax.tree_util.tree_map_with_path(follow, shapes.ema),
        skipped=whole,
        skipped_in_a_row=whole,
        expert_load=jax.tree.map(lambda _: whole, shapes.expert_load),
        loss_scale=jax.tree.map(lambda _: whole, shapes.loss_scale),
        held=None
        if shapes.held is None
        else jax.tree.map(
            lambda spec: NamedSharding(layout.mesh, spec), held_specs(shapes.held, parameter_specs(run, shapes.params, layout))
        ),
    )


def _nothing_held(run: RunConfig, values: Arrays, specs: dict[str, PartitionSpec], layout: Layout) -> Held | None:
    name = run.optimizer.gradient_compression
    if name == "none":
        return None
    shapes = {path: value.shape for path, value in values.items()}
    return nothing_held_by_shards(
        make_compression(name, run.optimizer.gradient_fraction), shapes, specs, layout, least=LEAST_COMPRESSED
    )
