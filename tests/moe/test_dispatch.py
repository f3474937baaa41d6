"""Dispatchers: names, the ragged offsets, exchanged bytes of a compiled step, spare rows full of NaN."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ernie_jax.moe.dispatch import ExchangeFormats, ExchangePlan, make_dispatcher
from ernie_jax.moe.dispatch.ragged import RaggedDispatcher, gathered_exchange, ragged_offsets
from ernie_jax.moe.permute import expand, permute, sort_by_expert
from ernie_jax.moe.routing import Routing
from ernie_jax.sharding import make_mesh
from ernie_jax.testing import collectives, loss_and_gradients, random_batch, tiny_moe

EXPERTS, K, TOKENS, DIM = 8, 3, 10, 4


def routing_of(kind, seed=0):
    rng = np.random.default_rng(seed)
    index = np.stack([rng.permutation(EXPERTS)[:K] for _ in range(4 * TOKENS)])
    if kind == "first expert":
        index[:, 0] = 0
        index[:, 1:] = [1, 2]
    elif kind == "last shard":
        index[:] = [6, 7, EXPERTS]
    elif kind == "one shard sends nothing":
        index[:TOKENS] = EXPERTS
    elif kind == "one expert a shard unused":
        index = index // 2 * 2
        index[:, 1:] = EXPERTS
    weights = np.where(index < EXPERTS, rng.random(index.shape), 0).astype(np.float32)
    return index.astype(np.int32), weights


def scale_by_expert(rows, sizes, first):
    """A stand-in for the experts: rows of expert e times e + 1; spare rows become NaN."""
    ends = jnp.cumsum(sizes)
    expert = jnp.searchsorted(ends, jnp.arange(rows.shape[0]), side="right")
    return jnp.where((expert < sizes.shape[0])[:, None], rows * (first + expert + 1.0)[:, None], jnp.nan)


def through(dispatcher, x, index, weights, weigh_rows=False):
    """x [N, D] over four expert shards through a dispatcher and the stand-in experts, which may weigh the rows themselves."""
    mesh = make_mesh(expert=4, devices=jax.devices()[:4])

    def body(x, index, weights):
        rows, sizes, residuals = dispatcher.dispatch(x, Routing(index, weights))
        if weigh_rows:
            row_weights, residuals = residuals.take_weights()
            rows = rows * row_weights[:, None]
        first = jax.lax.axis_index("expert") * (EXPERTS // 4)
        out = scale_by_expert(rows, sizes, first)
        # The spare rows of a real product are zero, never NaN; here NaN shows that the way back does not read them
        # except through weights that are zero, so they are cut as the grouped matmul does.
        return dispatcher.combine(jnp.where(jnp.isnan(out), 0.0, out), residuals)

    spec = P("expert")
    return jax.shard_map(body, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False)(x, index, weights)


PLAN = ExchangePlan(num_experts=EXPERTS, shards=4)
# In the compute format rows and lists share a buffer and nothing is rounded.
PACKED = replace(PLAN, formats=ExchangeFormats())
DISPATCHERS = {
    "replicated": lambda: make_dispatcher("replicated", PLAN),
    "all_to_all": lambda: make_dispatcher("all_to_all", PLAN),
    "ragged, offsets by a stand-in exchange": lambda: RaggedDispatcher(PLAN, exchange=gathered_exchange),
    "two_level": lambda: make_dispatcher("two_level", replace(PLAN, nodes=2)),
    "two_level, a node a device": lambda: make_dispatcher("two_level", replace(PLAN, nodes=4)),
    "replicated, packed": lambda: make_dispatcher("replicated", PACKED),
    "all_to_all, packed": lambda: make_dispatcher("all_to_all", PACKED),
    "ragged, packed": lambda: RaggedDispatcher(PACKED, exchange=gathered_exchange),
    "two_level, packed": lambda: make_dispatcher("two_level", replace(PACKED, nodes=2)),
}
KINDS = ("uniform", "first expert", "last shard", "one shard sends nothing", "one expert a shard unused")


@pytest.mark.parametrize("weigh_rows", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DISPATCHERS)
def test_value_and_gradients(name, kind, weigh_rows):
    """Case 12 at the level of the exchange: every token comes back with the sum over its experts, under any skew."""
    index, weights = routing_of(kind)
    x = np.random.default_rng(1).normal(size=(4 * TOKENS, DIM)).astype(np.float32)
    probe = np.random.default_rng(2).normal(size=x.shape).astype(np.float32)

    def expected(x, weights):
        factor = jnp.where(index < EXPERTS, weights * (index + 1.0), 0.0).sum(1)
        return jnp.sum(x * factor[:, None] * probe)

    def actual(x, weights):
        return jnp.sum(through(DISPATCHERS[name](), x, index, weights, weigh_rows) * probe)

    value, gradients = jax.jit(jax.value_and_grad(actual, (0, 1)))(x, weights)
    oracle, oracle_gradients = jax.value_and_grad(expected, (0, 1))(x, weights)
    np.testing.assert_allclose(value, oracle, rtol=1e-5)
    np.testing.assert_allclose(gradients[0], oracle_gradients[0], rtol=1e-5, atol=1e-5)
    used = index < EXPERTS
    np.testing.assert_allclose(np.where(used, gradients[1], 0), np.where(used, oracle_gradients[1], 0), rtol=1e-4, atol=1e-4)


def test_ragged_offsets():
    """Rows arrive ordered by sender; worked by hand for three devices."""
    counts = jnp.asarray([[1, 2, 0], [3, 0, 1], [0, 4, 2]])
    offsets = ragged_offsets(counts, jnp.int32(1))
    assert offsets.send_sizes.tolist() == [3, 0, 1]
    assert offsets.input_offsets.tolist() == [0, 3, 3]
    assert offsets.output_offsets.tolist() == [1, 2, 0], "after the rows of device 0"
    assert offsets.recv_sizes.tolist() == [2, 0, 4]
    back = ragged_offsets(counts.T, jnp.int32(1))
    assert back.send_sizes.tolist() == [2, 0, 4]
    assert back.recv_sizes.tolist() == [3, 0, 1]


def test_names_and_refusals():
    with pytest.raises(ValueError, match="unknown dispatch 'alltoall'"):
        make_dispatcher("alltoall", PLAN)
    with pytest.raises(ValueError, match="split over 4 devices"):
        make_dispatcher("local", PLAN)
    with pytest.raises(ValueError, match="does not have on CPU; use dispatch='all_to_all'"):
        make_dispatcher("ragged", PLAN)
    with pytest.raises(ValueError, match="over how many nodes the 4 devices of mesh axis 'expert' spread"):
        make_dispatcher("two_level", PLAN)
    with pytest.raises(ValueError, match="expert_nodes=3 does not divide the 4 devices"):
        make_dispatcher("two_level", replace(PLAN, nodes=3))


def test_sort_is_stable_and_inverse():
    index = jnp.asarray([2, 0, 3, 0, 2, 1, 3, 0])
    order, inverse, sizes = sort_by_expert(index, 3)
    assert index[order].tolist() == [0, 0, 0, 1, 2, 2, 3, 3]
    assert order.tolist() == [1, 3, 7, 5, 0, 4, 2, 6]
    assert order[inverse].tolist() == list(range(8))
    assert sizes.tolist() == [3, 1, 2]


def test_gathers_with_inverse_have_the_gradients_of_plain_gathers():
    index = jnp.asarray([2, 0, 3, 0, 2, 1])
    order, inverse, _ = sort_by_expert(index, 3)
    x, rows = jnp.arange(6.0).reshape(3, 2), jnp.arange(12.0).reshape(6, 2)
    probe = jnp.asarray(np.random.default_rng(0).normal(size=(6, 2)), jnp.float32)
    mine = jax.grad(lambda x: jnp.sum(expand(x, order, inverse) * probe))(x)
    plain = jax.grad(lambda x: jnp.sum(x[order // 2] * probe))(x)
    np.testing.assert_allclose(mine, plain, rtol=1e-6)
    mine = jax.grad(lambda r: jnp.sum(permute(r, order, inverse) * probe))(rows)
    np.testing.assert_allclose(mine, jax.grad(lambda r: jnp.sum(r[order] * probe))(rows), rtol=1e-6)


@functools.cache
def compiled_step(layer_start):
    config = tiny_moe(num_key_value_heads=4, layer_start=layer_start)
    result = loss_and_gradients(config, random_batch(config, 8, 12), make_mesh(data=2, tensor=2, expert=2))
    return collectives(result.hlo)


def test_six_all_to_alls_a_moe_layer_and_none_in_dense_layers():
    """Rows, lists and results forward; their transposes backward. The MoE layers share one scan body, so six in all."""
    found = [c for c in compiled_step(1) if c.kind == "all-to-all"]
    assert len(found) == 6
    assert all("moe" in c.name for c in found)


def test_no_expert_weight_is_gathered():
    """Local shapes of expert weights: [4, 32, 2, 8] and [4, 8, 32], with or without the layer axis."""
    forbidden = {(8, 32, 2, 8), (4, 32, 2, 16), (8, 32, 2, 16), (8, 8, 32), (4, 16, 32), (8, 16, 32)}
    for collective in compiled_step(1):
        if collective.kind == "all-gather":
            for shape in collective.shapes:
                assert shape not in forbidden and shape[1:] not in forbidden, collective


def test_a_bound_on_rows_shortens_the_buffers_and_changes_nothing():
    """Seven of twelve assignments go to an expert: as many rows are enough, for both ways of weighting and every gradient."""
    index = jnp.asarray([[2, 0, 3], [0, 3, 2], [3, 1, 3], [0, 3, 1]])
    rng = np.random.default_rng(0)
    x, weights, probe = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((4, 5), (4, 3), (4, 5)))
    weights = jnp.where(index < 3, weights, 0)

    def out(x, weights, plan, early):
        rows, sizes, residuals = make_dispatcher("local", plan).dispatch(x, Routing(index, weights))
        row_weights, taken = residuals.take_weights()
        y = jnp.sin(rows) * (row_weights[:, None] if early else 1)
        return make_dispatcher("local", plan).combine(y, taken if early else residuals), (rows.shape[0], sizes)

    plan = ExchangePlan(num_experts=3, shards=1)
    for early in (True, False):
        found = {}
        for bound in (None, 7):
            of = functools.partial(out, plan=replace(plan, expert_rows=bound), early=early)
            y, (rows, sizes) = of(x, weights)
            assert rows == (bound or 12) and sizes.tolist() == [3, 2, 2]
            found[bound] = y, *jax.grad(lambda *a, of=of: jnp.sum(of(*a)[0] * probe), argnums=(0, 1))(x, weights)
        for short, whole in zip(found[7], found[None], strict=True):
            np.testing.assert_allclose(short, jnp.where(index < 3, whole, 0) if whole.shape == (4, 3) else whole, rtol=1e-6)
