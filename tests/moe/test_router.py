"""The router: selection, weights, precision, statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ernie_jax.config import ComputeConfig
from ernie_jax.models import init_model
from ernie_jax.moe import RouterBias
from ernie_jax.moe.balance import balance_rate, update_bias
from ernie_jax.moe.capacity import apply_capacity, drop_padding
from ernie_jax.moe.router import route, router_stats, top_k_index
from ernie_jax.moe.routing import Routing
from ernie_jax.testing import tiny_moe


def test_bias_selects_and_does_not_weigh():
    """Case 1: the faulty version gives [0.533, 0.467]."""
    p, b = jnp.asarray([0.4, 0.3, 0.2, 0.1]), jnp.asarray([0.0, -0.2, 0.0, 0.25])
    routing, probabilities = route(jnp.log(p)[None], b, 2)
    chosen = dict(zip(routing.expert_index[0].tolist(), routing.weights[0].tolist(), strict=True))
    assert chosen.keys() == {0, 3}
    np.testing.assert_allclose([chosen[0], chosen[3]], [0.8, 0.2], rtol=1e-6)
    np.testing.assert_allclose(probabilities[0], p, rtol=1e-6)


def test_bias_decides_at_float32_resolution():
    """Case 2b: a bfloat16 bias would pick expert 0."""
    routing, _ = route(jnp.log(jnp.asarray([[0.2505, 0.2500, 0.4995 - 0.4]])), jnp.asarray([1.0, 1.001, 0.0]), 1)
    assert routing.expert_index.tolist() == [[1]]


def test_bias_and_gate_stay_float32_in_a_bfloat16_model():
    """Case 2a."""
    model = init_model(tiny_moe(), ComputeConfig(dtype="bfloat16", param_dtype="bfloat16"))
    biases = jax.tree.leaves(nnx.state(model, RouterBias))
    assert biases and all(leaf.dtype == jnp.float32 for leaf in biases)
    layer = model.decoder.segments[1].layers[0].moe
    assert layer.router.gate[...].dtype == jnp.float32
    assert layer.experts.gate_up[...].dtype == jnp.bfloat16


def test_a_thousand_bias_updates_arrive():
    """Case 2c: 1e-3 a thousand times is 1, where bfloat16 stalls at 0.5."""
    bias = jnp.zeros(2)
    for _ in range(1000):
        bias = update_bias(bias, jnp.asarray([0.0, 4.0]), 1e-3)
    np.testing.assert_allclose(bias, [1.0, -1.0], rtol=1e-4)


def test_bias_follows_the_summed_load():
    """Case 4: counts of two microbatches are added before the sign; the mean is not removed."""
    load = jnp.asarray([3.0, 1, 0, 0]) + jnp.asarray([0.0, 0, 3, 1])
    np.testing.assert_allclose(update_bias(jnp.zeros(4), load, 1e-3), 1e-3 * np.array([-1, 1, -1, 1]), rtol=1e-6)
    np.testing.assert_array_equal(update_bias(jnp.zeros(4), jnp.full(4, 2.0), 1e-3), np.zeros(4))


def test_router_logits_are_raw():
    """Case 3: what is returned is z, and the probabilities are softmaxed once."""
    z = jnp.asarray([[2.0, 0.0, -2.0]])
    _, probabilities = route(z, None, 1)
    np.testing.assert_allclose(probabilities, [[0.867, 0.117, 0.016]], atol=5e-4)
    valid = jnp.ones((1, 1), bool)
    stats = router_stats(z[None], probabilities[None], Routing(jnp.zeros((1, 1, 1), int), jnp.ones((1, 1, 1))), valid, 1, 0.0)
    np.testing.assert_allclose(stats.z_square, np.log(np.exp([2.0, 0, -2]).sum()) ** 2, rtol=1e-6)


def test_temperature_flattens_the_probabilities():
    z = jnp.asarray([[2.0, 0.0]])
    _, probabilities = route(z, None, 1, temperature=4.0)
    np.testing.assert_allclose(probabilities, jax.nn.softmax(z / 4), rtol=1e-6)


def test_top_k_equals_lax_top_k_with_ties():
    rng = np.random.default_rng(0)
    scores = jnp.asarray(rng.integers(0, 4, (50, 9)), jnp.float32)
    np.testing.assert_array_equal(top_k_index(scores, 5), jax.lax.top_k(scores, 5)[1])


def test_norm_min_bounds_the_normaliser():
    routing, _ = route(jnp.asarray([[0.0, 0.0]]), None, 1, norm_min=2.0)
    np.testing.assert_allclose(routing.weights, [[0.25]])


def test_too_many_experts_a_token():
    with pytest.raises(ValueError, match="cannot choose 3 experts a token from 2"):
        route(jnp.zeros((1, 2)), None, 3)


def test_capacity_drops_in_token_order_and_ignores_padding():
    """Case 8: padding takes no place and does not grow the capacity."""
    index = jnp.asarray([[[0, 1], [0, 2], [0, 1], [0, 3]]])
    routing, valid = Routing(index, jnp.full((1, 4, 2), 0.5)), jnp.ones((1, 4), bool)
    # 4 tokens x 2 choices / 4 experts = 2 a expert: expert 0 is asked four times.
    kept, dropped = apply_capacity(routing, valid, 4, 1.0)
    assert kept.expert_index.tolist() == [[[0, 1], [0, 2], [4, 1], [4, 3]]]
    assert kept.weights.tolist() == [[[0.5, 0.5], [0.5, 0.5], [0.0, 0.5], [0.0, 0.5]]]
    assert float(dropped) == 2
    padded = Routing(jnp.concatenate([jnp.zeros((1, 28, 2), index.dtype), index], 1), jnp.full((1, 32, 2), 0.5))
    valid = jnp.arange(32)[None] >= 28
    same, dropped = apply_capacity(drop_padding(padded, valid, 4), valid, 4, 1.0)
    assert same.expert_index[:, 28:].tolist() == kept.expert_index.tolist()
    assert float(dropped) == 2
    assert np.all(same.expert_index[:, :28] == 4)


def test_balance_rate():
    np.testing.assert_allclose(balance_rate(jnp.asarray([[1.0, 3.0], [2, 2], [0, 0]])), [2 / 3, 1, 1])
