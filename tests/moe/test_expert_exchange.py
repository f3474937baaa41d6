"""Experts of two modalities over an expert group: every way to exchange rows against a plain sum over all experts.

B rows, T tokens, D model, E experts of a modality, K chosen, F width.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ernie_jax.config import ComputeConfig
from ernie_jax.moe.dispatch import ExchangePlan
from ernie_jax.moe.exchange_parts import chunk_slices, routing_of, set_exchanges
from ernie_jax.moe.expert_exchange import apply_experts
from ernie_jax.moe.experts import ExpertWeights
from ernie_jax.moe.routing import Routing
from ernie_jax.parallel.quantized_rows import ROW_FORMATS
from ernie_jax.sharding import make_layout, make_mesh, use_layout
from ernie_jax.testing import collectives, tiny_vl

E, K, D, WIDTHS = 8, 3, 16, (8, 4)
CONFIG = tiny_vl(num_key_value_heads=4)
MESHES = {
    "data 2 x expert 4": {"data": 2, "expert": 4},
    "expert 8": {"expert": 8},
    "tensor 2 x expert 4": {"tensor": 2, "expert": 4},
}


class Fixed:
    """Experts that are these arrays, which stand in another order."""

    def __init__(self, arrays, seed):
        self.place = np.random.default_rng(seed).permutation(E).astype(np.int32)
        self.arrays = jax.tree.map(lambda a: a[np.argsort(self.place)], arrays)

    def weights(self):
        return self.arrays


def case(batch, tokens, skew, dim=D):
    """(x, weights, experts of both modalities, index, probe); the mixing weights are exact in bfloat16."""
    rng = np.random.default_rng(0)
    vision = rng.random((batch, tokens)) < 0.4
    index = np.stack([rng.permutation(E)[:K] for _ in range(batch * tokens)]).reshape(batch, tokens, K)
    if skew == "one expert of each":
        index[..., 0] = np.where(vision, 0, E - 1)
        index[..., 1:] = 2 * E
    elif skew == "one device, all text":
        index[:], vision[:] = [6, 7, 2 * E], False
    index = np.where(index < E, index + E * vision[..., None], 2 * E)
    index[0, : tokens // 3] = 2 * E
    if skew == "uniform":
        # Dropped by capacity, as it were: gaps in the lists.
        index[-1, :, 1] = 2 * E
    weights = np.where(index < 2 * E, np.round(rng.random(index.shape) * 128) / 128, 0).astype(np.float32)
    experts = tuple(
        ExpertWeights(*(jnp.asarray(rng.normal(size=shape) * 0.3, jnp.float32) for shape in ((E, dim, 2, f), (E, f, dim))))
        for f in WIDTHS
    )
    x, probe = (rng.normal(size=(batch, tokens, dim)).astype(np.float32) for _ in range(2))
    return x, weights, experts, index.astype(np.int32), probe


def plain(x, weights, experts, index, rounded=None):
    """Every token through every expert; the experts see `rounded`, and gradients pass as if they saw x."""
    rows = x if rounded is None else x + jax.lax.stop_gradient(rounded - x)
    y = jnp.zeros_like(x)
    for s, own in enumerate(experts):
        hidden = jnp.einsum("btd,edcf->btecf", rows, own.gate_up)
        out = jnp.einsum("btef,efd->bted", jax.nn.silu(hidden[..., 0, :]) * hidden[..., 1, :], own.down)
        mixing = jnp.sum(jnp.where(index[..., None] == s * E + jnp.arange(E), weights[..., None], 0.0), 2)
        y += jnp.einsum("bted,bte->btd", out, mixing)
    return y


def results(function, x, weights, experts, probe):
    """(value, gradients of x, mixing weights and experts, compiled text)."""

    def loss(x, weights, experts):
        y = function(x, weights, experts)
        return jnp.sum(y * probe), y

    compiled = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True)).lower(x, weights, experts).compile()
    gradients, y = compiled(x, weights, experts)
    return y, gradients, compiled.as_text()


def exchanged(mesh, index, compute):
    """The function (x, weights, experts) over a mesh; the grouped products are dense, so that compiling is quick."""
    mesh = make_mesh(**mesh, devices=jax.devices()[: int(np.prod(list(mesh.values())))])
    layout = make_layout(mesh, CONFIG)

    def function(x, weights, experts):
        with use_layout(layout):
            held = [Fixed(w, seed) for seed, w in enumerate(experts)]
            return apply_experts(x, Routing(jnp.asarray(index), weights), held, (None, None), compute, "silu")[0]

    return function


def check(mesh, batch=8, tokens=12, skew="uniform", rows="compute", tolerance=1e-5, **compute):
    x, weights, experts, index, probe = case(batch, tokens, skew)
    rounded = None if rows == "compute" else there_and_back(rows, x)
    expected = results(functools.partial(plain, index=index, rounded=rounded), x, weights, experts, probe)
    compute = ComputeConfig(grouped_matmul="dense", **compute)
    got = results(exchanged(MESHES[mesh], index, compute), x, weights, experts, probe)
    used = index < 2 * E
    for mine, theirs in ((got[0], expected[0]), (got[1][0], expected[1][0]), (got[1][1] * used, expected[1][1] * used)):
        np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance * np.abs(theirs).max())
    for mine, theirs in zip(jax.tree.leaves(got[1][2]), jax.tree.leaves(expected[1][2]), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance * np.abs(theirs).max())
    return got[2]


def there_and_back(name, x):
    row = ROW_FORMATS[name]
    return jax.jit(lambda x: row.read(row.write(x), x.shape[-1], x.dtype))(x)


# Exact ways: (mesh, sizes, skew, settings).
EXACT = {
    "two levels": ("expert 8", {}, "uniform", {"dispatch": "two_level", "expert_nodes": 4}),
    "chunks, odd sizes, worst skew": ("expert 8", {"batch": 3, "tokens": 7}, "one device, all text", {"exchange_chunks": 2}),
    "vision first, two levels": (
        "data 2 x expert 4",
        {"batch": 3, "tokens": 7},
        "one expert of each",
        {"exchange_order": "vision_first", "dispatch": "two_level", "expert_nodes": 2},
    ),
    "vision first, replicated, no vision": (
        "tensor 2 x expert 4",
        {},
        "one device, all text",
        {"exchange_order": "vision_first", "dispatch": "replicated"},
    ),
    "capacity, apart, in chunks": (
        "expert 8",
        {},
        "uniform",
        # More than any expert is given here, less than all tokens.
        {"capacity_factor": 1.5, "exchange_order": "text_first", "exchange_chunks": 2},
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_exact_ways_equal_the_plain_sum(name):
    mesh, sizes, skew, settings = EXACT[name]
    check(mesh, **sizes, skew=skew, **settings)


ROUNDED = {
    "fp8": ("data 2 x expert 4", "uniform", {}),
    "fp8, replicated": ("tensor 2 x expert 4", "uniform", {"dispatch": "replicated"}),
    "int8, two levels": ("data 2 x expert 4", "one expert of each", {"dispatch": "two_level", "expert_nodes": 2}),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_rows_equal_one_device_that_rounds_them(name):
    """The experts see rows as the format reads them; the gradients of the rows are those of the rounded rows."""
    mesh, skew, settings = ROUNDED[name]
    rows = name.split(",")[0]
    hlo = check(mesh, batch=3, tokens=7, skew=skew, rows=rows, exchange_dtype=rows, **settings)
    if not settings:
        # Rows with their lists, and results; and the same backward. What arrived is kept, not sent again.
        assert len(all_to_alls(hlo)) == 4


def test_bfloat16_rounds_both_ways():
    check("data 2 x expert 4", exchange_dtype="bfloat16", tolerance=3e-2)


def test_rounded_gradients_are_near_and_the_value_is_untouched():
    x, weights, experts, index, probe = case(8, 12, "uniform")
    exact = results(functools.partial(plain, index=index), x, weights, experts, probe)
    got = results(
        exchanged(MESHES["data 2 x expert 4"], index, ComputeConfig(grouped_matmul="dense", exchange_backward="fp8")),
        *(x, weights, experts, probe),
    )
    np.testing.assert_allclose(got[0], exact[0], rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(jax.tree.leaves(got[1]), jax.tree.leaves(exact[1]), strict=True):
        mine, theirs = np.asarray(mine).ravel(), np.asarray(theirs).ravel()
        difference = np.linalg.norm(mine - theirs) / np.linalg.norm(theirs)
        # Some rounding there must be, of no more than a step of the format.
        assert 1e-4 < difference < 2**-4


def all_to_alls(hlo):
    return [c for c in collectives(hlo) if c.kind == "all-to-all"]


def test_bytes_of_the_exchange_in_the_compiled_program():
    """G buckets of n rows of 128 columns: in float32, lists of 2 x 3 floats apart; else with the set of 4 experts and 3 weights."""
    n, G = 12, 4
    x, weights, experts, index, _ = case(8, n, "uniform", dim=128)
    expected = {
        None: [G * n * 128 * 4, G * n * 2 * 3 * 4, G * n * 128 * 4],
        "bfloat16": [G * n * (256 + 2 + 3 * 2), G * n * 256],
        "fp8": [G * n * (128 + 4 + 1 + 3 * 2), G * n * 128 * 4],
        "int8": [G * n * (128 + 4 + 1 + 3 * 2), G * n * 128 * 4],
    }
    for name, sizes in expected.items():
        compute = ComputeConfig(grouped_matmul="dense", exchange_dtype=name)
        function = exchanged({"data": 2, "expert": 4}, index, compute)
        hlo = jax.jit(function).lower(x, weights, experts).compile().as_text()
        assert sorted(c.bytes for c in all_to_alls(hlo)) == sorted(sizes), name
    assert expected["fp8"][0] / expected["bfloat16"][0] <= 0.53


def test_a_token_crosses_to_a_node_at_most_once():
    """Over 8 devices in 2 nodes of 4: a flat exchange has 4 buckets in the other node, two levels have one."""
    n = 12
    x, weights, experts, index, _ = case(8, n, "uniform")
    crossing = {}
    for name, settings in (("flat", {}), ("two levels", {"dispatch": "two_level", "expert_nodes": 2})):
        compute = ComputeConfig(grouped_matmul="dense", exchange_dtype="bfloat16", **settings)
        function = exchanged({"expert": 8}, index, compute)
        found = all_to_alls(jax.jit(function).lower(x, weights, experts).compile().as_text())
        crossing[name] = sum(c.bytes_between(4) for c in found)
    # Of each of 8 devices: n rows of 16 columns, a word of experts and their weights (1 + 1 of a device, 3 of a node), and back.
    assert crossing["flat"] == 8 * 4 * n * ((16 + 1 + 2) + 16) * 2
    assert crossing["two levels"] == 8 * n * ((16 + 1 + 3) + 16) * 2


def ancestors(jaxpr, wanted):
    """For each equation of a primitive that contains `wanted`, which of them it needs (as numbers of their order)."""
    needs, found = {}, []
    for equation in jaxpr.eqns:
        own = set().union(*(needs.get(v, set()) for v in equation.invars if not hasattr(v, "val")), set())
        if wanted(equation):
            found.append((equation, frozenset(own)))
            own = own | {len(found) - 1}
        for v in equation.outvars:
            needs[v] = own
    return found


def body_of(function, *args):
    """The equations of one device: the jaxpr inside `shard_map`."""

    def inner(jaxpr):
        for equation in jaxpr.eqns:
            for value in equation.params.values():
                part = getattr(value, "jaxpr", value)
                if hasattr(part, "eqns"):
                    if equation.primitive.name == "shard_map":
                        return part
                    deeper = inner(part)
                    if deeper is not None:
                        return deeper
        return None

    return inner(jax.make_jaxpr(function)(*args).jaxpr)


def test_a_chunk_s_exchange_does_not_wait_for_another_s_experts():
    x, weights, experts, index, _ = case(8, 12, "uniform")
    compute = ComputeConfig(grouped_matmul="dense", exchange_chunks=3, exchange_dtype="fp8", remat="full")
    body = body_of(exchanged({"data": 2, "expert": 4}, index, compute), x, weights, experts)
    exchanges = [(e, n) for e, n in ancestors(body, lambda e: "all_to_all" in str(e)) if "all_to_all" in str(e)]
    # Of each chunk one there and one back; what comes back needs what went there, of its own chunk alone.
    assert [sorted(need) for _, need in exchanges] == [[], [0], [], [2], [], [4]]


@pytest.mark.parametrize("order", ["text_first", "vision_first"])
def test_the_second_modality_is_sent_when_the_first_has_arrived(order):
    x, weights, experts, index, _ = case(8, 12, "uniform")
    compute = ComputeConfig(grouped_matmul="dense", exchange_order=order, exchange_dtype="fp8", remat="full")
    body = body_of(exchanged({"data": 2, "expert": 4}, index, compute), x, weights, experts)
    exchanges = ancestors(body, lambda e: "all_to_all" in str(e))
    assert [sorted(need) for _, need in exchanges] == [[], [0], [0], [0, 1]]
    assert set_exchanges(order, 2, ExchangePlan(num_experts=16, shards=4))[0].sets == ((0,) if order == "text_first" else (1,))


def test_routing_of_one_modality():
    """2 x 8 experts over 4 devices: numbers 4 d .. 4 d + 1 are text's of device d, 4 d + 2 .. 4 d + 3 vision's."""
    plan = ExchangePlan(num_experts=16, shards=4)
    text, vision = set_exchanges("text_first", 2, plan)
    routing = Routing(jnp.asarray([[0, 5, 16], [2, 15, 16]]), jnp.asarray([[0.5, 0.25, 0.0], [0.125, 0.75, 0.0]]))
    own = routing_of(text, routing, 2, plan)
    assert own.expert_index.tolist() == [[0, 3, 8], [8, 8, 8]] and own.weights.tolist() == [[0.5, 0.25, 0.0], [0.0, 0.0, 0.0]]
    own = routing_of(vision, routing, 2, plan)
    assert own.expert_index.tolist() == [[8, 8, 8], [0, 7, 8]] and own.weights.tolist() == [[0.0, 0.0, 0.0], [0.125, 0.75, 0.0]]
    (both,) = set_exchanges("together", 2, plan)
    assert routing_of(both, routing, 2, plan) is routing


def test_chunks_are_even_and_cover_everything():
    assert chunk_slices(10, 3) == [slice(0, 3), slice(3, 6), slice(6, 10)]
    assert chunk_slices(2, 5) == [slice(0, 1), slice(1, 2)]
    assert chunk_slices(7, 1) == [slice(0, 7)]
