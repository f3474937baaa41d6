"""Chunked cross-entropy: equal to the whole, in value and gradient, with memory that follows the chunk."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ernie_jax.nn.dtypes import DtypePolicy
from ernie_jax.objectives import chunked_cross_entropy, token_losses
from ernie_jax.sharding import make_layout, make_mesh
from ernie_jax.testing import tiny_moe

RNG = np.random.default_rng(0)
HIDDEN = jnp.asarray(RNG.normal(size=(4, 13, 32)), jnp.float32)
KERNEL = jnp.asarray(RNG.normal(size=(64, 32)), jnp.float32)
LABELS = jnp.asarray(np.where(RNG.random((4, 13)) < 0.4, -100, RNG.integers(0, 64, (4, 13))))


def whole(hidden, kernel, labels):
    logp = jax.nn.log_softmax(hidden @ kernel.T)
    picked = jnp.take_along_axis(logp, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
    return -jnp.sum(jnp.where(labels >= 0, picked, 0))


def chunked(hidden, kernel, labels, chunk, layout=None):
    return chunked_cross_entropy(hidden, kernel, labels, DtypePolicy(), chunk=chunk, layout=layout)[0]


@pytest.mark.parametrize("chunk", [1, 5, 12, 52, 1000])
def test_equals_the_whole(chunk):
    value, gradients = jax.value_and_grad(chunked, (0, 1))(HIDDEN, KERNEL, LABELS, chunk)
    expected, expected_gradients = jax.value_and_grad(whole, (0, 1))(HIDDEN, KERNEL, LABELS)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for mine, theirs in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)


def test_each_loss_is_told_and_weights_change_the_sum_alone():
    weights = jnp.asarray(np.random.default_rng(5).uniform(0, 2, LABELS.shape), jnp.float32)

    def whole(hidden, kernel):
        return jnp.sum(token_losses(hidden @ kernel.T, LABELS) * weights)

    def pieces(hidden, kernel):
        return chunked_cross_entropy(hidden, kernel, LABELS, DtypePolicy(), chunk=8, weights=weights)[0]

    total, losses = chunked_cross_entropy(HIDDEN, KERNEL, LABELS, DtypePolicy(), chunk=8, weights=weights)
    np.testing.assert_allclose(losses, token_losses(HIDDEN @ KERNEL.T, LABELS), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(total, whole(HIDDEN, KERNEL), rtol=1e-5)
    got, want = (jax.grad(f, argnums=(0, 1))(HIDDEN, KERNEL) for f in (pieces, whole))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


def test_on_a_mesh():
    layout = make_layout(make_mesh(data=2, tensor=2, expert=2), tiny_moe())
    value = jax.jit(lambda h, k, y: chunked(h, k, y, 6, layout))(HIDDEN, KERNEL, LABELS)
    np.testing.assert_allclose(value, whole(HIDDEN, KERNEL, LABELS), rtol=1e-5)


def test_nothing_scored_is_zero_with_finite_gradients():
    """Case 32: -100 everywhere, and logits that would make 0 x NaN."""
    none = jnp.full_like(LABELS, -100)
    value, gradient = jax.value_and_grad(chunked)(HIDDEN, KERNEL, none, 8)
    assert float(value) == 0
    np.testing.assert_array_equal(gradient, np.zeros_like(gradient))
    losses = token_losses(jnp.asarray([[0.0, jnp.inf]]), jnp.asarray([-100]))
    assert losses.tolist() == [0.0]


def test_memory_follows_the_chunk():
    hidden, kernel = jnp.zeros((1, 2048, 32)), jnp.zeros((4096, 32))
    labels = jnp.zeros((1, 2048), int)

    def temporary(chunk):
        compiled = jax.jit(jax.grad(chunked, (0, 1)), static_argnums=3).lower(hidden, kernel, labels, chunk).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    full_logits = 2048 * 4096 * 4
    assert temporary(2048) > full_logits
    assert temporary(64) < full_logits / 4
