"""Moving experts changes where they are computed and nothing of what is computed, bit for bit where sums keep their order."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ernie_jax.models import inputs_of
from ernie_jax.sharding import map_variables, path_name, variables_by_path
from ernie_jax.testing import multimodal_rows, random_batch, tiny_moe, tiny_vl
from ernie_jax.train.gradients import make_gradients
from ernie_jax.train.move_experts import make_move, places_of, reorder
from ernie_jax.train.state import abstract_state, state_shardings
from ernie_jax.train.step import make_train_step, model_of

MOVES = {"placement_every": 4}
MESHES = {"one device": {}, "expert 8": {"expert": 8}, "data 2 x expert 4": {"data": 2, "expert": 4}}


def shuffled(run, seed=0):
    """Other places for every expert: router -> [L, E]."""
    rng, moe = np.random.default_rng(seed), run.model.moe
    names = ["router"] if moe.vision_intermediate_size is None else ["router", "vision_router"]
    return {
        n: np.stack([rng.permutation(moe.num_experts) for _ in range(run.model.num_moe_layers)]).astype(np.int32) for n in names
    }


def lived_in(state, seed=1):
    """Biases, moments and averages as after some training: all different numbers."""
    rng = np.random.default_rng(seed)

    def noise(x):
        return jnp.asarray(np.asarray(x) + 0.01 * rng.random(x.shape), x.dtype)

    biases = map_variables(lambda path, v: noise(v.get_value()) if path.endswith("bias") else v.get_value(), state.biases)
    opt = state.opt_state._replace(mu=jax.tree.map(noise, state.opt_state.mu), nu=jax.tree.map(noise, state.opt_state.nu))
    return replace(state, biases=biases, opt_state=opt, ema=None if state.ema is None else jax.tree.map(noise, state.ema))


def logits(run, layout, state, batch):
    graphdef, weights = nnx.split(model_of(run, layout, state))
    return np.asarray(jax.jit(lambda w, b: nnx.merge(graphdef, w).forward(inputs_of(b)).logits)(weights, batch))


def by_expert(run, state):
    """Every array of the state on the host, those of experts in the order of the experts' numbers."""
    tables = {
        p.removesuffix("place"): np.asarray(v.get_value())
        for p, v in variables_by_path(state.biases).items()
        if p.endswith("place")
    }
    arrays = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda v: isinstance(v, nnx.Variable)):
        name, value = path_name(path), np.asarray(leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf)
        for prefix, table in tables.items():
            if prefix in name and not name.endswith("place"):
                value = np.take_along_axis(value, table.reshape(*table.shape, *(1,) * (value.ndim - 2)), 1)
        if not name.endswith("place"):
            arrays[name] = value
    return arrays


@pytest.mark.parametrize("stages", [1, 2])
def test_reorder_is_the_look_up_it_says(stages):
    rng = np.random.default_rng(0)
    stack = rng.normal(size=(4, 8, 3, 2)).astype(np.float32)
    stack[0, 0] = -0.0
    stack[1, 1] = np.nan
    source = np.stack([rng.permutation(8) for _ in range(4)])
    got = jax.jit(lambda x, s: reorder(x, s, stages, 4))(stack, source)
    wanted = np.take_along_axis(stack, source[:, :, None, None], 1)
    np.testing.assert_array_equal(np.asarray(got).view(np.uint32), wanted.view(np.uint32))


@pytest.mark.parametrize("mesh", MESHES)
def test_a_move_changes_no_bit_of_what_is_computed(mesh, tiny_run, layout_of, fresh_state):
    """Two experts a token: a sum of two has no order. All state of an expert goes with it."""
    run = tiny_run(moe=MOVES, optimizer={"ema_decay": 0.9})
    layout, batch = layout_of(run, **MESHES[mesh]), random_batch(run.model, 8, 12)
    state = jax.device_put(lived_in(fresh_state(run, layout_of(run))), state_shardings(run, layout))
    before, values = logits(run, layout, state, batch), by_expert(run, state)
    places = shuffled(run)
    moved = make_move(run, layout)(state, places)
    np.testing.assert_array_equal(places_of(run, moved)["router"], places["router"])
    np.testing.assert_array_equal(logits(run, layout, moved, batch), before)
    after = by_expert(run, moved)
    assert after.keys() == values.keys()
    for name in values:
        np.testing.assert_array_equal(after[name], values[name], err_msg=name)


def test_what_shards_hold_back_of_an_expert_goes_with_it(tiny_run, layout_of, fresh_state):
    """In all, sums over devices: the parts of rounded sums, which have no experts, become part of what is held of the arrays."""
    run = tiny_run(moe=MOVES, optimizer={"gradient_compression": "int8"})
    layout, rng = layout_of(run, data=2, expert=4), np.random.default_rng(0)
    wanted = abstract_state(run, layout).held
    held = jax.tree.map(lambda a: jax.device_put(rng.normal(size=a.shape).astype(a.dtype), a.sharding), wanted)
    before = jax.device_get(held)
    places = shuffled(run)
    state = replace(fresh_state(tiny_run(moe=MOVES), layout), held=held)
    after = jax.device_get(make_move(run, layout)(state, places).held)
    of_experts = 0
    for path, old in before.items():
        if old is None or "/experts/" not in path:
            assert (old is None) == (after[path] is None)
            assert old is None or np.array_equal(old.of_array, after[path].of_array)
            continue
        of_experts += 1
        layers, experts, *rest = old.of_array.shape[1:]
        # [2 shards, 1, 4 devices, 1, ..., part]: a device's piece has two experts of every layer.
        pieces = np.moveaxis(old.of_sum.reshape(2, 4, -1), 0, 1).reshape(4, layers, 2, *rest)
        total = old.of_array.sum(0) + np.moveaxis(pieces, 0, 1).reshape(layers, experts, *rest)
        # Every expert had its own place.
        moved = np.take_along_axis(total, np.argsort(places["router"], -1).reshape(layers, experts, *(1,) * len(rest)), 1)
        np.testing.assert_allclose(after[path].of_array.sum(0), moved, atol=1e-6, err_msg=path)
        assert not after[path].of_sum.any()
    assert of_experts == 2


@pytest.mark.parametrize("mesh", ["one device", "data 2 x expert 4"])
def test_steps_after_a_move_are_those_without(mesh, tiny_run, layout_of, fresh_state, batch_of):
    """Three experts a token, a capacity, near ties in the bias: loss, counts, and the state after two steps.

    On one device bit for bit; where a token's three experts are added device by device, to rounding.
    """
    run = tiny_run(model=tiny_moe(), moe={**MOVES, "capacity_factor": 1.0, "orthogonal_coef": 0.1, "orthogonal_groups": 2})
    layout = layout_of(run, **MESHES[mesh])
    step, results = make_train_step(run, layout), []
    for move in (False, True):
        state = jax.device_put(fresh_state(run, layout_of(run)), state_shardings(run, layout))
        if move:
            state = make_move(run, layout)(state, shuffled(run))
        for seed in range(2):
            state, metrics = step(state, batch_of(run, seed))
        router = jax.device_get(metrics["router"])
        results.append((by_expert(run, state), float(metrics["loss"]), router))
    (values, loss, router), (moved_values, moved_loss, moved_router) = results
    np.testing.assert_array_equal(moved_router["load"], router["load"])
    assert router["dropped"].sum() > 0
    if mesh == "one device":
        assert moved_loss == loss
    np.testing.assert_allclose(moved_loss, loss, rtol=1e-6)
    for name, value in values.items():
        if mesh == "one device":
            np.testing.assert_array_equal(moved_values[name], value, err_msg=name)
        np.testing.assert_allclose(moved_values[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    if mesh != "one device":
        assert not np.array_equal(moved_router["device_load"], router["device_load"])


def test_experts_of_both_modalities_move_apart(tiny_run, layout_of, fresh_state):
    run = tiny_run(model=tiny_vl(num_hidden_layers=2, num_experts_per_tok=2), moe=MOVES, seq_len=24)
    layout = layout_of(run, data=2, expert=4)
    batch = multimodal_rows(run.model).batch(layout.shards("batch"))
    gradients, results = jax.jit(make_gradients(run, layout)), []
    for move in (False, True):
        state = jax.device_put(fresh_state(run, layout_of(run)), state_shardings(run, layout))
        if move:
            state = make_move(run, layout)(state, shuffled(run))
        grads, total, parts = gradients(state, batch)
        results.append((float(total), by_expert(run, replace(state, opt_state=grads)), jax.device_get(parts.vision_stats)))
    (total, values, stats), (moved_total, moved_values, moved_stats) = results
    assert moved_total == total
    np.testing.assert_array_equal(moved_stats[0].load, stats[0].load)
    assert stats[0].load.sum() > 0
    for name, value in values.items():
        np.testing.assert_allclose(moved_values[name], value, rtol=1e-5, atol=1e-7, err_msg=name)
