"""Experts of two modalities in one layer: each token through its own, against a loop over tokens; nothing leaks to the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ernie_jax.config import ComputeConfig
from ernie_jax.moe import MoE
from ernie_jax.moe.dispatch import shard_major
from ernie_jax.sharding import variables_by_path
from ernie_jax.testing import oracle_moe, tiny_vl

CONFIG = tiny_vl()
B, T, D = 2, 9, CONFIG.hidden_size
X = jnp.asarray(np.random.default_rng(0).normal(size=(B, T, D)), jnp.float32)
VALID = np.ones((B, T), bool)
VALID[1, 7:] = False
# Of each row: text, image with its markers, text; the second begins with a video.
MIXED = np.array([[0, 0, 1, 1, 1, 1, 0, 0, 0], [2, 2, 2, 0, 0, 1, 1, 1, 1]]) != 0


@pytest.fixture(scope="module")
def split():
    layer = MoE(CONFIG, ComputeConfig(), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(1)
    for router in (layer.router, layer.vision_router):
        router.bias[...] = jnp.asarray(rng.normal(size=8) * 0.05, jnp.float32)
    return nnx.split(layer)


@pytest.fixture(scope="module")
def run(split):
    @jax.jit
    def call(state, x, modality):
        return nnx.merge(split[0], state)(x, jnp.asarray(VALID), modality, with_logits=True)

    return call


def by_tokens(state, modality):
    """The layer's output and each token's chosen experts, one token at a time in float64."""
    w = {path: np.asarray(v[...], np.float64) for path, v in variables_by_path(state).items()}
    x, vision = np.asarray(X, np.float64).reshape(-1, D), modality.reshape(-1)
    y, chosen = np.zeros(x.shape), np.zeros((len(x), 3), int)
    for mask, prefix in ((~vision, ""), (vision, "vision_")):
        gate, bias = w[f"{prefix}router/gate"], w[f"{prefix}router/bias"]
        y[mask], chosen[mask] = oracle_moe(x[mask], gate, bias, w[f"{prefix}experts/gate_up"], w[f"{prefix}experts/down"], 3)
    y[~VALID.reshape(-1)] = 0
    gate, up = (x @ w["shared_experts/gate_up"][:, i] for i in range(2))
    y += (gate / (1 + np.exp(-gate)) * up) @ w["shared_experts/down"]
    return y.reshape(X.shape), chosen.reshape(B, T, 3)


@pytest.mark.parametrize("modality", [MIXED, np.zeros_like(MIXED), np.ones_like(MIXED)], ids=["mixed", "text", "vision"])
def test_each_token_goes_through_the_experts_of_its_modality(split, run, modality):
    """One program for batches of both, of text and of images alone; the shared experts are added once to every row."""
    y, out = run(split[1], X, modality)
    expected, chosen = by_tokens(split[1], modality)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    for stats, mask in ((out.stats, VALID & ~modality), (out.vision, VALID & modality)):
        np.testing.assert_array_equal(stats.load, np.bincount(chosen[mask].reshape(-1), minlength=8))
        assert stats.tokens == mask.sum()


def test_text_alone_is_the_layer_without_vision_experts(split, run):
    graphdef, state = split
    alone, out = nnx.merge(graphdef, state)(X, jnp.asarray(VALID))
    assert out.vision is None
    np.testing.assert_allclose(alone, run(state, X, np.zeros_like(MIXED))[0], rtol=1e-5, atol=1e-6)


def test_router_scores_are_those_of_the_own_gate(split, run):
    logits = np.asarray(run(split[1], X, MIXED)[1].logits)
    w = variables_by_path(split[1])
    for mask, name in ((~MIXED, "router"), (MIXED, "vision_router")):
        np.testing.assert_allclose(logits[mask], np.asarray(X)[mask] @ np.asarray(w[f"{name}/gate"][...]).T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("changed", ["", "vision_"], ids=["text experts", "vision experts"])
def test_changing_the_experts_of_one_modality_leaves_the_other_bit_for_bit(split, run, changed):
    state = split[1]
    kept = MIXED if not changed else ~MIXED
    # Of the layer's own rows alone, so that the cotangents do not depend on what is changed.
    cotangent = jnp.asarray(np.random.default_rng(3).normal(size=X.shape), jnp.float32)

    def gradients(state):
        params, rest = nnx.split_state(state, nnx.Param, ...)
        value, pullback = jax.vjp(lambda p: run(nnx.merge_state(p, rest), X, MIXED)[0], params)
        return np.asarray(value), {path: np.asarray(v[...]) for path, v in variables_by_path(pullback(cotangent)[0]).items()}

    before, before_gradients = gradients(state)
    for expert in (0, 3, 7):
        other = jax.tree.map(lambda x: x, state)
        for name in ("gate_up", "down"):
            variable = variables_by_path(other)[f"{changed}experts/{name}"]
            variable[...] = variable[...].at[expert].add(1.0)
        after, after_gradients = gradients(other)
        np.testing.assert_array_equal(after[kept], before[kept])
        assert not np.array_equal(after[~kept & VALID], before[~kept & VALID])
        theirs = "" if changed else "vision_"
        for name in ("experts/gate_up", "experts/down", "router/gate"):
            np.testing.assert_array_equal(after_gradients[theirs + name], before_gradients[theirs + name])


def test_experts_have_no_gradient_from_tokens_of_the_other_modality(split, run):
    params, rest = nnx.split_state(split[1], nnx.Param, ...)

    def loss(params, mask):
        return jnp.sum(jnp.where(mask[..., None], run(nnx.merge_state(params, rest), X, MIXED)[0], 0.0) ** 2)

    for mask, silent, heard in ((MIXED, "", "vision_"), (~MIXED, "vision_", "")):
        grads = {path: np.asarray(v[...]) for path, v in variables_by_path(jax.grad(loss)(params, mask)).items()}
        for name in ("experts/gate_up", "experts/down", "router/gate"):
            assert not grads[silent + name].any(), silent + name
            assert grads[heard + name].any(), heard + name


def test_each_device_holds_its_share_of_both_kinds():
    """64 + 64 experts over 8 devices: 8 + 8 each, text first; the number that goes nowhere stays."""
    numbers = np.asarray(shard_major(jnp.arange(129), 64, 2, 8))
    assert sorted(numbers[:128]) == list(range(128)) and numbers[128] == 128
    device, place = numbers[:128] // 16, numbers[:128] % 16
    np.testing.assert_array_equal(device, np.tile(np.repeat(np.arange(8), 8), 2))
    np.testing.assert_array_equal(place, np.concatenate([np.tile(np.arange(8), 8), np.tile(np.arange(8, 16), 8)]))
