"""Moving experts between devices, with all that a run keeps of them. L MoE layers, R of a stack, E experts, G devices, S stages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ernie_jax.config.run import RunConfig
from ernie_jax.parallel import Held, held_by_arrays
from ernie_jax.sharding import Layout, path_name, variables_by_path
from ernie_jax.train.moe_layers import EXPERTS_OF, from_stacks, to_stacks
from ernie_jax.train.optimizer import Arrays
from ernie_jax.train.state import TrainState, no_load, parameter_specs, state_shardings, with_values


def places_of(run: RunConfig, state: TrainState) -> Arrays:
    """Where the experts of each router stand: `router` (and `vision_router`) -> [L, E] int32, layers in order."""
    tables = {path: variable.get_value() for path, variable in variables_by_path(state.biases).items()}
    return {name: from_stacks(run.model, f"{EXPERTS_OF[name]}/place", tables) for name in state.expert_load}


def make_move(run: RunConfig, layout: Layout) -> Callable[[TrainState, Arrays], TrainState]:
    """The compiled `(state, places as places_of gives them) -> state`; the given state's buffers are reused.

    Weights, moments, averages and whatever else of the state lies under an expert's path with the same [R, E] in front are put
    into the new order, values untouched, and the tables of places with them; the router has nothing to move. So the state computes
    what it did before. What data shards hold back of experts' gradients moves too, after it has been put in terms of the gradients'
    elements. The loads that led to the move are set to zero.
    """
    shardings = state_shardings(run, layout)
    stages, devices = layout.shards("layers"), layout.shards("expert")

    def move(state: TrainState, places: Arrays) -> TrainState:
        before = {path: variable.get_value() for path, variable in variables_by_path(state.biases).items()}
        after: Arrays = {}
        for name, new in places.items():
            after |= to_stacks(run.model, f"{EXPERTS_OF[name]}/place", new)
        # At place p comes to stand the expert whose new place that is, from its old one.
        sources = {
            path.removesuffix("place"): jnp.take_along_axis(before[path], jnp.argsort(new, axis=-1), axis=-1)
            for path, new in after.items()
        }

        def source_of(path: str) -> jax.Array | None:
            return next((source for prefix, source in sources.items() if prefix in path and not path.endswith("/place")), None)

        def moved(path: str, values: jax.Array) -> jax.Array:
            source = source_of(path)
            if source is None:
                return values
            assert values.shape[:2] == source.shape, f"{path} of shape {values.shape} lies under experts of shape {source.shape}"
            return reorder(values, source, stages, devices)

        def leaf(path: tuple[Any, ...], value: Any) -> Any:
            name = path_name(path)
            return value.replace(moved(name, value.get_value())) if isinstance(value, nnx.Variable) else moved(name, value)

        def moved_held(held: Held) -> Held:
            of_experts = {path: own for path, own in held.items() if own is not None and source_of(path) is not None}
            if not of_experts:
                return held
            each = held_by_arrays(of_experts, parameter_specs(run, state.params, layout), layout)
            # A data shard's are as the array itself.
            return held | {
                path: replace(own, of_array=jax.vmap(functools.partial(moved, path))(own.of_array)) for path, own in each.items()
            }

        rest = replace(state, held=None)
        new = jax.tree_util.tree_map_with_path(leaf, rest, is_leaf=lambda v: isinstance(v, nnx.Variable))
        held = None if state.held is None else moved_held(state.held)
        return replace(new, biases=with_values(state.biases, after), expert_load=no_load(run), held=held)

    return jax.jit(move, in_shardings=(shardings, layout.replicated), out_shardings=shardings, donate_argnums=0)


def reorder(stack: jax.Array, source: jax.Array, stages: int, devices: int) -> jax.Array:
    """[R, E, ...] with what stood at place source[r, p] of layer r at place p.

    A layer (of each stage) and an expert (of each device) at a time: the devices hold at most one expert of each of them
    besides their own, whatever the partitioner makes of the look-up, instead of all experts of all layers.

    Args:
      stack: [R, E, ...], R in S equal parts over stages, E in G equal parts over devices.
      source: [R, E], a permutation of the places in each layer.
      stages: S.
      devices: G.
    """
    (layers, experts), rest = stack.shape[:2], stack.shape[2:]
    # As whole numbers: the partitioner adds zeros of the devices that have nothing, and -0.0 + 0.0 is 0.0.
    bits = jax.lax.bitcast_convert_type(stack, f"uint{8 * stack.dtype.itemsize}")
    split = bits.reshape(stages, layers // stages, experts, *rest)
    wanted = source.reshape(stages, layers // stages, devices, experts // devices)

    def layer(i: jax.Array, split: jax.Array) -> jax.Array:
        old = jax.lax.dynamic_index_in_dim(split, i, 1, keepdims=False)
        places = jax.lax.dynamic_index_in_dim(wanted, i, 1, keepdims=False)

        def place(j: jax.Array) -> jax.Array:
            taken = jax.lax.dynamic_index_in_dim(places, j, 2, keepdims=False)
            return jax.vmap(lambda values, at: jnp.take(values, at, axis=0, mode="clip"))(old, taken)

        # [E / G, S, G, ...], one expert of each device after the other.
        new = jax.lax.map(place, jnp.arange(experts // devices))
        new = jnp.moveaxis(new, 0, 2).reshape(stages, experts, *rest)
        return jax.lax.dynamic_update_index_in_dim(split, new, i, 1)

    bits = jax.lax.fori_loop(0, layers // stages, layer, split).reshape(stack.shape)
    return jax.lax.bitcast_convert_type(bits, stack.dtype)
