"""Router losses against closed forms and NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from ernie_jax.moe import load_balance_loss, orthogonal_loss, transformers_auxiliary_loss, z_loss


def test_perfect_balance_is_k():
    k, experts, tokens = 3, 6, 60
    value = load_balance_loss(
        jnp.full(experts, tokens / experts), jnp.full(experts, tokens * k / experts), jnp.float32(tokens), jnp.float32(tokens)
    )
    np.testing.assert_allclose(value, k, rtol=1e-6)


def test_parts_of_a_step_add_up():
    rng = np.random.default_rng(0)
    mass, counts = rng.random((4, 8)).astype(np.float32), rng.integers(0, 9, (4, 8)).astype(np.float32)
    whole = load_balance_loss(mass.sum(0), counts.sum(0), jnp.float32(40), jnp.float32(40))
    parts = sum(load_balance_loss(m, counts.sum(0), jnp.float32(40), jnp.float32(40)) for m in mass)
    np.testing.assert_allclose(parts, whole, rtol=1e-6)
    expected = 8 * sum(mass.sum(0)[e] / 40 * counts.sum(0)[e] / 40 for e in range(8))
    np.testing.assert_allclose(whole, expected, rtol=1e-6)


def test_no_tokens_is_zero_and_finite():
    zero = jnp.zeros(4)
    assert float(load_balance_loss(zero, zero, jnp.float32(0), jnp.float32(0))) == 0
    assert float(z_loss(jnp.float32(0), jnp.float32(0))) == 0


def numpy_orthogonal(gate, groups):
    rows = gate / np.maximum(np.linalg.norm(gate, axis=1, keepdims=True), 1e-12)
    size = len(gate) // groups
    total = 0.0
    for g in range(groups):
        gram = rows[g * size : (g + 1) * size] @ rows[g * size : (g + 1) * size].T
        total += ((gram - np.eye(size)) ** 2).sum()
    return total / (groups * size**2)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_orthogonal_loss(groups):
    gate = np.random.default_rng(1).normal(size=(8, 5)).astype(np.float32)
    np.testing.assert_allclose(orthogonal_loss(jnp.asarray(gate), groups), numpy_orthogonal(gate, groups), rtol=1e-5)
    stacked = orthogonal_loss(jnp.asarray(np.stack([gate, 3 * gate])), groups)
    np.testing.assert_allclose(stacked, [numpy_orthogonal(gate, groups)] * 2, rtol=1e-5)


def test_orthogonal_loss_of_orthogonal_rows_and_of_a_zero_row():
    np.testing.assert_allclose(orthogonal_loss(jnp.eye(4) * 7), 0, atol=1e-12)
    gradient = jax.grad(lambda g: orthogonal_loss(g))(jnp.zeros((3, 4)).at[0, 0].set(1.0))
    assert np.all(np.isfinite(gradient))


def test_orthogonal_gradient_by_differences():
    gate = jnp.asarray(np.random.default_rng(2).normal(size=(4, 3)), jnp.float32)
    direction = jnp.asarray(np.random.default_rng(3).normal(size=(4, 3)), jnp.float32)
    eps = 1e-2
    numeric = (orthogonal_loss(gate + eps * direction) - orthogonal_loss(gate - eps * direction)) / (2 * eps)
    np.testing.assert_allclose(jnp.vdot(jax.grad(orthogonal_loss)(gate), direction), numeric, rtol=1e-3)


def test_groups_that_do_not_divide():
    with pytest.raises(ValueError, match="8 experts cannot be split into 3 equal groups"):
        orthogonal_loss(jnp.ones((8, 2)), 3)


@pytest.mark.parametrize("name", ["moe", "moe_noshared"])
def test_the_reported_auxiliary_loss_of_transformers(golden, name):
    io = load_file(golden / name / "io.safetensors")
    logits = np.stack([io[key] for key in sorted(io) if key.startswith("router_")])
    np.testing.assert_allclose(transformers_auxiliary_loss(jnp.asarray(logits), 3), io["aux_loss"][0], rtol=1e-5)
