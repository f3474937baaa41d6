"""Experts in FP8: every product against quantise-then-multiply in NumPy, any mesh, and what is kept for the backward pass.

R rows, D model, F width, E experts.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from ernie_jax.config import ComputeConfig
from ernie_jax.config.compute import Fp8Config
from ernie_jax.moe import MoE
from ernie_jax.moe.expert_exchange import apply_experts
from ernie_jax.moe.experts import Experts, ExpertWeights
from ernie_jax.moe.fp8_experts import Fp8Experts
from ernie_jax.moe.quantized_products import GroupedProducts, RowGroups
from ernie_jax.moe.routing import Routing
from ernie_jax.sharding import make_layout, make_mesh, one_device_mesh, use_layout
from ernie_jax.testing import loss_and_gradients, random_batch, tiny_moe, tiny_vl

FORMATS = {"e4m3": (ml_dtypes.float8_e4m3fn, 448.0), "e5m2": (ml_dtypes.float8_e5m2, 57344.0)}
E, D, F = 3, 140, 150
SIZES = [9, 0, 130]
R = 2 + sum(SIZES) + 3  # two rows of another kind before, three spare ones behind


def through_fp8(x, name, height, width):
    """x [n, m] after a round trip in tiles, in float64."""
    kind, most = FORMATS[name]
    out = np.zeros(x.shape)
    for i in range(0, x.shape[0], height):
        for j in range(0, x.shape[1], width):
            part = x[i : i + height, j : j + width].astype(np.float32)
            amax = np.abs(part).max()
            scale = np.float32(1.0) if amax == 0 else amax * np.float32(1 / most)
            out[i : i + height, j : j + width] = np.clip(part / scale, -most, most).astype(kind).astype(np.float64) * scale
    return out


def silu(x):
    return x / (1 + np.exp(-x))


def by_hand(rows, row_weights, gate_up, down, d_out, config):
    """Output and gradients, one expert after another in float64, each operand through FP8 where the recipe says so."""
    form, wide = config.gradient_format, config.weight_gradient
    out, d_rows, d_weights = np.zeros((R, D)), np.zeros((R, D)), np.zeros(R)
    d_gate_up, d_down = np.zeros(gate_up.shape), np.zeros(down.shape)
    first = 2
    for e, size in enumerate(SIZES):
        own = slice(first, first + size)
        first += size
        if not size:
            continue
        x, w, dy = rows[own], row_weights[own, None], d_out[own]
        q_gate, q_up = (through_fp8(gate_up[e, :, i], "e4m3", 128, 128) for i in (0, 1))
        q_down, q_x = through_fp8(down[e], "e4m3", 128, 128), through_fp8(x, "e4m3", 1, 128)
        gate, up = q_x @ q_gate, q_x @ q_up
        out[own] = through_fp8(silu(gate) * up * w, "e4m3", 1, 128) @ q_down
        gate, up = (through_fp8(a, "e4m3", 1, 128) for a in (gate, up))
        acted = silu(gate) * up
        d_acted = through_fp8(dy, form, 1, 128) @ q_down.T
        d_weights[own] = (d_acted * acted).sum(-1)
        slope = 1 / (1 + np.exp(-gate))
        d_gate, d_up = d_acted * w * up * slope * (1 + gate * (1 - slope)), d_acted * w * silu(gate)
        d_rows[own] = through_fp8(d_gate, form, 1, 128) @ q_gate.T + through_fp8(d_up, form, 1, 128) @ q_up.T
        q_acted = through_fp8(acted * w, "e4m3", 1, 128)
        if wide:
            q_x, q_acted = (through_fp8(a, "e4m3", 128, 1) for a in (q_x, q_acted))
            d_gate, d_up, dy = (through_fp8(a, form, 128, 1) for a in (d_gate, d_up, dy))
        d_gate_up[e, :, 0], d_gate_up[e, :, 1], d_down[e] = q_x.T @ d_gate, q_x.T @ d_up, q_acted.T @ dy
    return out, d_rows, d_weights, d_gate_up, d_down


@pytest.mark.parametrize("backend", ["blocks", "dense"])
@pytest.mark.parametrize(
    "config", [Fp8Config(), Fp8Config(gradient_format="e5m2"), Fp8Config(gradient_format="e5m2", weight_gradient=True)]
)
def test_products_and_gradients_equal_quantise_then_multiply(config, backend):
    rng = np.random.default_rng(0)
    rows, row_weights = rng.normal(size=(R, D)).astype(np.float32), rng.random(R).astype(np.float32)
    gate_up = (0.1 * rng.normal(size=(E, D, 2, F))).astype(np.float32)
    down, d_out = (0.1 * rng.normal(size=(E, F, D))).astype(np.float32), rng.normal(size=(R, D)).astype(np.float32)
    expected = by_hand(rows, row_weights, gate_up, down, d_out, config)
    rows[-3:] = np.nan

    def run(rows, row_weights, gate_up, down):
        weights, groups = ExpertWeights(gate_up, down), RowGroups(jnp.array(SIZES), jnp.int32(2))
        experts = Fp8Experts(config, GroupedProducts(backend), "silu")
        return experts(rows, row_weights, weights, weights.quantized(), groups)[0]

    out, pullback = jax.vjp(jax.jit(run), rows, row_weights, gate_up, down)
    for name, got, want in zip(("out", "rows", "row weights", "gate_up", "down"), (out, *pullback(d_out)), expected, strict=True):
        got = np.asarray(got)[:-3] if len(got) == R else np.asarray(got)
        want = want[:-3] if len(want) == R else want
        # A number near the middle of two FP8 numbers may fall either way in float32 and in float64: a few of 20,000.
        assert np.linalg.norm(got - want) < 2e-3 * np.linalg.norm(want), name
        assert np.median(np.abs(got - want)) < 1e-5 * np.abs(want).max(), name
    assert (np.asarray(out)[-3:] == 0).all()
    assert (np.asarray(pullback(d_out)[0])[-3:] == 0).all()


def layer_of(width, mesh, rules="tp_sp", **exchange):
    """Output, its gradients, and counts of one layer of experts on a mesh, the operands the same on every mesh."""
    config = tiny_moe(num_key_value_heads=4)
    config = replace(config, moe=replace(config.moe, intermediate_size=width))
    compute = ComputeConfig(fp8=Fp8Config(), **exchange)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(8, 12, 32)), jnp.float32)
    index = np.stack([rng.permutation(8)[:3] for _ in range(96)]).reshape(8, 12, 3)
    weights = jnp.asarray(rng.random((8, 12, 3)), jnp.float32)
    target = jnp.asarray(rng.normal(size=x.shape), jnp.float32)
    experts = Experts(config.moe, 32, width, compute, initializer_range=0.2, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(experts)

    def loss(x, weights, state):
        with use_layout(make_layout(mesh, config, rules)):
            sets = [nnx.merge(graphdef, state)]
            y, counts = apply_experts(x, Routing(jnp.asarray(index, jnp.int32), weights), sets, (None,), compute, "silu")
        return (y * target).sum(), (y, counts)

    gradients, (y, counts) = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(x, weights, state)
    return [np.asarray(a) for a in jax.tree.leaves((y, gradients))], counts


@pytest.fixture(scope="module")
def alone():
    return {width: layer_of(width, one_device_mesh()) for width in (256, 16)}


@pytest.mark.parametrize(
    ("sizes", "rules", "exchange"),
    [
        ({"data": 2, "tensor": 2, "expert": 2}, "tp_sp", {"exchange_chunks": 3}),
        ({"data": 2, "expert": 4}, "fsdp", {"dispatch": "replicated"}),
    ],
)
def test_tiles_inside_a_shard_do_not_depend_on_the_mesh(sizes, rules, exchange, alone):
    mesh = make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])
    arrays, (counts,) = layer_of(256, mesh, rules, **exchange)
    expected, (expected_counts,) = alone[256]
    for got, want in zip(arrays, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
    np.testing.assert_allclose(counts.underflow, expected_counts.underflow, rtol=1e-6)
    np.testing.assert_array_equal(counts.values[1], expected_counts.values[1])


def test_a_width_that_shards_cut_within_a_tile_has_other_scales_and_still_agrees(alone):
    """16 over two tensor shards: tiles of 8 instead of 16, finer scales; the difference is one of FP8's rounding."""
    mesh = make_mesh(data=2, tensor=2, expert=2, devices=jax.devices()[:8])
    arrays, _ = layer_of(16, mesh)
    differences = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(arrays, alone[16][0], strict=True)]
    assert 1e-4 < max(differences) < 0.1


def test_a_model_on_a_mesh_agrees_with_one_device():
    """Within 1e-2: rounding in float32 outside the experts tips a few numbers of theirs to the other FP8 neighbour."""
    config = tiny_moe(num_key_value_heads=4, num_hidden_layers=2)
    config = replace(config, moe=replace(config.moe, intermediate_size=256))
    batch, compute = random_batch(config, 8, 12), ComputeConfig(fp8=Fp8Config())
    mesh = make_mesh(data=2, tensor=2, expert=2, devices=jax.devices()[:8])
    one, eight = (loss_and_gradients(config, batch, m, compute=compute) for m in (one_device_mesh(), mesh))
    assert eight.loss == pytest.approx(one.loss, rel=1e-4)
    for path, gradient in one.gradients.items():
        assert np.linalg.norm(eight.gradients[path] - gradient) < 1e-2 * np.linalg.norm(gradient), path
    counts = eight.parts.stats[0].fp8
    # Each of the two tensor shards casts all of a row, and its half of the row's width.
    np.testing.assert_array_equal(counts.values, eight.parts.stats[0].load.sum() * np.array([2 * 32, 256]))


def test_each_modality_has_products_and_counts_of_its_own():
    """On one device, and where vision travels first in buckets of its own, in chunks."""
    config, rng = tiny_vl(), np.random.default_rng(0)
    x, vision = jnp.asarray(rng.normal(size=(2, 9, 32)), jnp.float32), jnp.asarray(rng.random((2, 9)) < 0.4)
    apart = {"exchange_order": "vision_first", "exchange_chunks": 2}
    configs = ComputeConfig(), ComputeConfig(fp8=Fp8Config()), ComputeConfig(fp8=Fp8Config(), **apart)
    plain, quantised, quantised_apart = (MoE(config, compute, rngs=nnx.Rngs(0)) for compute in configs)

    def run(layer, x, layout=None):
        def call(layer, x):
            with use_layout(layout):
                return layer(x, jnp.ones((2, 9), bool), vision)

        return nnx.jit(call)(layer, x)

    y, output = run(quantised, x)
    expected, _ = run(plain, x)
    on_mesh = run(quantised_apart, x, make_layout(make_mesh(expert=2, devices=jax.devices()[:2]), config))
    np.testing.assert_allclose(on_mesh[0], y, rtol=1e-4, atol=1e-4 * np.abs(y).max())
    jax.tree.map(np.testing.assert_array_equal, *((o.stats.fp8, o.vision.fp8) for o in (on_mesh[1], output)))
    # Of the routed experts alone the error would be about 5%.
    assert 1e-3 < np.linalg.norm(y - expected) / np.linalg.norm(expected) < 0.06
    assert output.vision is not None
    for stats, tokens, width in ((output.stats, (~vision).sum(), 16), (output.vision, vision.sum(), 8)):
        np.testing.assert_array_equal(stats.fp8.values, tokens * 3 * np.array([32, width]))
        np.testing.assert_array_equal(stats.fp8.saturated, 0)
