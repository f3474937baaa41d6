"""Generation with a cache against full forward passes; batches against single rows."""

import jax
import numpy as np
import pytest

from ernie_jax.models import init_model
from ernie_jax.serve import SamplingConfig, generate, generate_tokens
from ernie_jax.sharding import make_layout, make_mesh
from ernie_jax.testing import tiny_moe

CONFIG = tiny_moe()
PROMPTS = [[5], [9, 8, 7], [11, 12, 13, 14, 15, 16, 17]]
NO_STOP = [-1]


@pytest.fixture(scope="module")
def model():
    return init_model(CONFIG, seed=2)


@pytest.fixture(scope="module")
def batched(model):
    return [c.token_ids for c in generate_tokens(model, PROMPTS, max_new_tokens=16, stop_token_ids=NO_STOP)]


def test_greedy_equals_argmax_of_full_passes(model, batched):
    ids = list(PROMPTS[1])
    for _ in range(6):
        # Padded on the right to one shape: causal attention does not look there.
        logits = model(np.array([ids + [0] * (16 - len(ids))])).logits[0, len(ids) - 1]
        ids.append(int(logits.argmax()))
    assert batched[1][:6] == ids[3:]


def test_rows_of_a_batch_equal_each_alone(model, batched):
    """Case 40: prompts of 1, 3 and 7 tokens together and alone."""
    for prompt, expected in zip(PROMPTS, batched, strict=True):
        (alone,) = generate_tokens(model, [prompt], max_new_tokens=16, stop_token_ids=NO_STOP)
        assert alone.token_ids == expected
        assert alone.finish_reason == "length"


def test_a_row_that_ends_early_leaves_the_others_alone(model, batched):
    stops = [[-1], [batched[1][4]], [-1]]
    first = batched[1].index(batched[1][4])
    result = generate_tokens(model, PROMPTS, max_new_tokens=16, stop_token_ids=stops)
    assert [c.finish_reason for c in result] == ["length", "stop", "length"]
    assert [c.token_ids for c in result] == [batched[0], batched[1][:first], batched[2]]


def test_sampled_rows_do_not_depend_on_neighbours(model):
    settings = [SamplingConfig(temperature=0.9, top_p=0.9, top_k=20, seed=s) for s in (3, 4, 5)]
    together = generate_tokens(model, PROMPTS, max_new_tokens=8, sampling=settings, stop_token_ids=NO_STOP)
    alone = generate_tokens(model, PROMPTS[2:], max_new_tokens=8, sampling=settings[2:], stop_token_ids=NO_STOP)
    assert together[2] == alone[0]


def test_the_end_of_the_cache_ends_a_row(model, batched):
    (short,) = generate_tokens(model, [PROMPTS[2]], max_new_tokens=16, cache_length=12, stop_token_ids=NO_STOP)
    assert short.finish_reason == "length"
    assert short.token_ids == batched[2][:5]


def test_on_a_mesh(batched):
    layout = make_layout(make_mesh(data=2, tensor=2, expert=2), CONFIG, "serve")
    result = generate_tokens(init_model(CONFIG, layout=layout, seed=2), PROMPTS, max_new_tokens=16, stop_token_ids=NO_STOP)
    assert [c.token_ids for c in result] == batched


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "no prompts"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[64]], {}, r"token id 64; expected ids in 0..63"),
        ([[1] * 300], {}, "300 tokens leaves no room in a cache of 256"),
        ([[1] * 8], {"cache_length": 8}, "8 tokens leaves no room in a cache of 8"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens=0"),
        ([[1]], {"sampling": []}, "0 sampling settings for 1 prompts"),
    ],
)
def test_bad_requests(model, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        generate_tokens(model, prompts, **options)


class Letters:
    """One token a letter."""

    def encode(self, text):
        return [ord(c) - 60 for c in text]

    def decode(self, ids):
        return "".join(chr(i + 60) for i in ids)


def test_text_in_text_out(model):
    one = generate(model, Letters(), "HELLO", max_new_tokens=5, stop_token_ids=NO_STOP)
    assert isinstance(one, str)
    assert len(one) == 5
    many = generate(model, Letters(), ["HELLO", "A"], max_new_tokens=5, stop_token_ids=NO_STOP)
    assert many[0] == one
    assert jax.device_count() == 8
