"""The text model against an independent NumPy model, at unusual shapes."""

import jax
import numpy as np
import pytest
from flax import nnx

from ernie_jax.config import count_parameters
from ernie_jax.models import abstract_model, init_model
from ernie_jax.sharding import variables_by_path
from ernie_jax.testing import oracle_logits, random_batch, tiny_dense, tiny_moe

CONFIGS = {
    "dense, head width not D / heads": tiny_dense(),
    "moe": tiny_moe(),
    "untied, no shared experts": tiny_moe(tie_word_embeddings=False, num_shared_experts=0),
    "interval 2": tiny_moe(num_hidden_layers=5, layer_start=0, layer_interval=2),
    "moe in the middle": tiny_moe(num_hidden_layers=6, layer_start=2, layer_end=3),
    "interval 3 cut short": tiny_moe(num_hidden_layers=8, layer_start=1, layer_end=6, layer_interval=3),
}


def arrays(model):
    return {path: np.asarray(v[...]) for path, v in variables_by_path(nnx.state(model)).items()}


def with_random_bias(model, seed=0):
    rng = np.random.default_rng(seed)
    graphdef, state = nnx.split(model)
    for path, variable in variables_by_path(state).items():
        if path.endswith("router/bias"):
            variable.set_value(0.1 * rng.normal(size=variable.shape).astype(np.float32))
    return nnx.merge(graphdef, state)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_the_oracle(name):
    config = CONFIGS[name]
    model = with_random_bias(init_model(config, seed=3))
    batch = random_batch(config, 3, 9)
    out = model(batch["input_ids"], segment_ids=batch["segment_ids"], position_ids=batch["position_ids"])
    expected = oracle_logits(config, arrays(model), batch["input_ids"], batch["segment_ids"], batch["position_ids"])
    real = batch["segment_ids"] != 0
    np.testing.assert_allclose(np.asarray(out.logits)[real], expected[real], rtol=1e-4, atol=1e-4)
    assert len(out.router) == config.num_moe_layers


@pytest.mark.parametrize("name", CONFIGS)
def test_parameter_count_by_shape_evaluation(name):
    config = CONFIGS[name]
    total = sum(v.size for v in jax.tree.leaves(nnx.state(abstract_model(config))))
    assert total == count_parameters(config).total


def test_hidden_states_and_router_outputs_are_those_of_each_layer():
    config = tiny_moe()
    out = init_model(config)(np.arange(10).reshape(2, 5), output_hidden_states=True)
    assert len(out.hidden_states) == config.num_hidden_layers + 1
    assert [r.logits.shape for r in out.router] == [(2, 5, 8)] * 2
    assert [float(r.load.sum()) for r in out.router] == [30.0, 30.0]


def test_packed_documents_do_not_see_each_other():
    """Case 27: changing document A leaves B bit-unchanged, B equals itself alone, and B's loss has no gradient in A."""
    config = tiny_moe()
    model = init_model(config, seed=1)
    rng = np.random.default_rng(0)
    a, b, other = rng.integers(3, 64, (3, 6))
    segments, positions = np.array([[1] * 6 + [2] * 6]), np.array([[*range(6), *range(6)]])
    packed = model(np.concatenate([a, b])[None], segment_ids=segments, position_ids=positions).logits[0, 6:]
    changed = model(np.concatenate([other, b])[None], segment_ids=segments, position_ids=positions).logits[0, 6:]
    alone = model(b[None]).logits[0]
    np.testing.assert_array_equal(packed, changed)
    np.testing.assert_allclose(packed, alone, rtol=1e-5, atol=1e-5)


def test_left_padding_equals_no_padding():
    config = tiny_moe()
    model = init_model(config, seed=1)
    ids = np.array([[7, 8, 9, 10]])
    alone = model(ids).logits
    padded = model(
        np.array([[0, 0, 7, 8, 9, 10]]),
        attention_mask=np.array([[0, 0, 1, 1, 1, 1]]),
        position_ids=np.array([[0, 0, 0, 1, 2, 3]]),
    )
    np.testing.assert_allclose(padded.logits[:, 2:], alone, rtol=1e-5, atol=1e-5)
    assert float(padded.router[0].load.sum()) == 4 * 3, "padding is nobody's load"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": np.zeros((5,), int)}, r"expected \[batch, tokens\]"),
        ({"input_ids": np.zeros((0, 5), int)}, r"both at least 1"),
        ({"input_ids": np.zeros((1, 5), float)}, "expected integers"),
        ({"input_ids": np.full((1, 5), 64)}, r"span 64..64; expected token ids in 0..63"),
        ({"input_ids": np.full((1, 5), -1)}, r"span -1..-1"),
        ({"input_ids": np.zeros((1, 5), int), "attention_mask": np.ones((1, 4), int)}, r"attention_mask has shape \(1, 4\)"),
        ({"input_ids": np.zeros((1, 5), int), "position_ids": np.zeros((1, 5))}, "position_ids has dtype float64"),
    ],
)
def test_bad_inputs_say_what_is_wrong(arguments, message):
    with pytest.raises(ValueError, match=message):
        init_model(tiny_moe())(**arguments)
