"""Logits after the last token: the last layer reads all tokens and goes on with one; result and cache are those of a whole pass."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from ernie_jax import native
from ernie_jax.config import ComputeConfig
from ernie_jax.models import init_model, text_inputs
from ernie_jax.nn.kv_cache import KVCache
from ernie_jax.sharding import make_layout, make_mesh
from ernie_jax.testing import tiny_dense, tiny_moe
from ernie_jax.train.program_flops import program_flops

CONFIGS = {
    "one segment": tiny_dense(),
    "dense, then moe": tiny_moe(),
    "a unit of two": tiny_moe(num_hidden_layers=5, layer_start=0, layer_interval=2),
    "a last segment of one dense layer": tiny_moe(num_hidden_layers=4, layer_start=1, layer_end=2),
}


def next_logits(model, ids, mask, cache):
    """Compiled, as generation does it."""
    graphdef, state = nnx.split(model)

    def step(state, ids, mask, cache):
        model = nnx.merge(graphdef, state)
        positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0) + cache.index
        return model.next_logits(text_inputs(model.config, ids, mask, position_ids=positions), cache)

    return jax.jit(functools.partial(step, ids=ids, mask=mask))(state, cache=cache)


def prompts(tokens=7):
    """Two rows, the second with padding on the left."""
    ids = np.random.default_rng(0).integers(3, 64, (2, tokens))
    mask = np.ones((2, tokens), int)
    mask[1, :3] = 0
    return ids, mask


def check(config, compute=ComputeConfig(), layout=None):
    model = init_model(config, compute, layout=layout, seed=2)
    (ids, mask), slots = prompts(), 12
    empty = KVCache.create(config, 2, slots, np.float32)
    whole = model(ids, attention_mask=mask, position_ids=np.maximum(np.cumsum(mask, axis=1) - 1, 0), cache=empty)
    logits, cache = next_logits(model, ids, mask, empty)
    np.testing.assert_allclose(logits, whole.logits[:, -1], rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(jax.tree.leaves(cache), jax.tree.leaves(whole.cache), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
    # Several tokens behind a filled cache, then one.
    for more in (np.array([[5, 6, 7]] * 2), np.array([[9]] * 2)):
        ones = np.ones_like(more)
        positions = int(cache.index) + np.broadcast_to(np.arange(more.shape[1]), more.shape)
        whole = model(more, attention_mask=ones, position_ids=positions, cache=cache)
        logits, cache = next_logits(model, more, ones, cache)
        np.testing.assert_allclose(logits, whole.logits[:, -1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_equal_to_the_whole_pass(name):
    check(CONFIGS[name])


def test_on_a_mesh():
    config = CONFIGS["dense, then moe"]
    check(config, layout=make_layout(make_mesh(data=2, tensor=2, expert=2), config, "serve"))


def test_with_a_limit_on_the_load_of_experts_everyone_in_the_row_counts():
    check(CONFIGS["dense, then moe"], ComputeConfig(capacity_factor=0.5))


def test_only_keys_and_values_of_the_last_layer_are_made_for_all_tokens():
    config, tokens = tiny_dense(), 32
    graphdef, state = nnx.split(init_model(config))
    inputs = text_inputs(config, np.full((1, tokens), 5))

    def flops(run):
        with native.switched_off():
            return program_flops(lambda state, cache: run(nnx.merge(graphdef, state), cache), state, cache)

    cache = KVCache.create(config, 1, tokens, np.float32)
    whole = flops(lambda model, cache: model.forward(inputs, cache).logits)
    last = flops(lambda model, cache: model.next_logits(inputs, cache)[0])
    d, heads, width = config.hidden_size, config.num_attention_heads, config.head_dim
    a_token = 2 * (2 * d * heads * width + 3 * d * config.intermediate_size + d * config.vocab_size) + 4 * tokens * heads * width
    assert whole - last == (tokens - 1) * a_token
