"""What a compiled decode step touches: experts by rows of their weights, the cache in place. E experts, D model, F width."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ernie_jax.models import TextInputs, init_model
from ernie_jax.nn.kv_cache import KVCache
from ernie_jax.serve import generate_tokens
from ernie_jax.serve.generate import _generate
from ernie_jax.testing import tiny_moe

# A width and a depth no other array has, so that shapes in a program name the experts.
CONFIG = tiny_moe(intermediate_size=24, num_hidden_layers=4)
BATCH, SLOTS = 2, 40


@pytest.fixture(scope="module")
def model():
    return init_model(CONFIG, seed=3)


@pytest.fixture(scope="module")
def program(model):
    graphdef, state = nnx.split(model)

    def steps(state, tokens):
        model = nnx.merge(graphdef, state)
        cache = KVCache.create(CONFIG, BATCH, SLOTS, jnp.float32)

        def step(i, carry):
            cache, tokens = carry
            ones = jnp.ones((BATCH, 1), jnp.int32)
            logits, cache = model.next_logits(TextInputs(tokens[:, None], ones, i * ones), cache)
            return cache, jnp.argmax(logits, -1).astype(jnp.int32)

        return jax.lax.fori_loop(0, 8, step, (cache, tokens))[1]

    return jax.jit(steps).lower(state, jnp.zeros((BATCH,), jnp.int32)).compile().as_text()


def made(program, shape):
    """Instructions that make an array of this shape, other than those that only pass it on."""
    text = ",".join(map(str, shape))
    pattern = re.compile(rf"= f32\[{text}\]\S* (?!parameter|get-tuple-element|bitcast|while)([\w-]+)\(")
    return pattern.findall(program)


def test_no_layer_of_expert_weights_is_ever_copied(program):
    experts, dim, width = CONFIG.moe.num_experts, CONFIG.hidden_size, 24
    for shape in ((experts, dim, 2, width), (experts, dim, 2 * width), (experts, width, dim)):
        assert made(program, shape) == [], shape
        assert made(program, (1, *shape)) == [], shape


def test_the_cache_is_written_in_place(program):
    layers = CONFIG.num_moe_layers
    shape = (layers, BATCH, SLOTS, CONFIG.num_key_value_heads, CONFIG.head_dim)
    entry = program.index("\nENTRY ")
    # Made once at the start; then nothing but updates, of which a loop's fusion is one: a copy would be one for every token.
    assert made(program[entry:], shape)
    inside = set(made(program[:entry], shape))
    assert "dynamic-update-slice" in inside and "copy" not in inside, inside


def test_experts_that_no_token_chooses_may_hold_anything(model):
    prompt = [[5, 9, 33]]
    expected = generate_tokens(model, prompt, max_new_tokens=3, stop_token_ids=[-1])[0].token_ids
    logits = model(np.array([prompt[0] + expected]))
    chosen = np.stack([np.asarray(router.stats.load) > 0 for router in logits.router])
    assert not chosen.all()
    graphdef, state = nnx.split(model)

    def poison(path, value):
        names = [str(getattr(key, "key", key)) for key in path]
        if "experts" not in names or value.shape[0] != len(chosen):
            return value
        mask = jnp.asarray(chosen).reshape(chosen.shape + (1,) * (value.ndim - 2))
        return jnp.where(mask, value, jnp.nan)

    poisoned = nnx.merge(graphdef, jax.tree_util.tree_map_with_path(poison, state))
    assert generate_tokens(poisoned, prompt, max_new_tokens=3, stop_token_ids=[-1])[0].token_ids == expected


def test_one_program_serves_prompts_of_similar_length(model):
    before = _generate._cache_size()
    for length in (3, 5, 9):
        generate_tokens(model, [list(range(1, length + 1))], max_new_tokens=4, stop_token_ids=[-1])
    assert _generate._cache_size() - before <= 1
