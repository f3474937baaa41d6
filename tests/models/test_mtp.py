"""Blocks of multi-token prediction against an independent NumPy reading, and what they leave alone."""

import jax
import numpy as np
import pytest
from flax import nnx

from ernie_jax.config import ComputeConfig, count_parameters, preset
from ernie_jax.models import abstract_model, init_model, inputs_of
from ernie_jax.sharding import logical_axes, make_layout, make_mesh, variables_by_path
from ernie_jax.testing import oracle_mtp_logits, random_batch, tiny_dense, tiny_moe, tiny_vl

CONFIGS = {
    "one block": tiny_moe(num_nextn_predict_layers=1),
    "three blocks, untied": tiny_moe(num_nextn_predict_layers=3, tie_word_embeddings=False),
    "dense": tiny_dense(num_nextn_predict_layers=2),
}


def arrays(model):
    return {path: np.asarray(v[...]) for path, v in variables_by_path(nnx.state(model)).items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_each_block_equal_the_oracle(name):
    """At the places that can be scored: what stands beyond a document's end is zero there and other tokens here."""
    config = CONFIGS[name]
    model, batch = init_model(config, ComputeConfig(mtp=True), seed=3), random_batch(config, 3, 9)
    inputs = inputs_of({key: jax.numpy.asarray(value) for key, value in batch.items()})
    stream, _ = model.stream(inputs)
    logits = np.einsum("nbtd,vd->nbtv", model.further_hidden(stream, inputs), model.head_kernel)
    segments = batch["segment_ids"]
    expected = oracle_mtp_logits(config, arrays(model), batch["input_ids"], segments, batch["position_ids"])
    assert logits.shape == expected.shape == (config.num_nextn_predict_layers, 3, 9, 64)
    for i in range(config.num_nextn_predict_layers):
        scored = np.zeros(segments.shape, bool)
        scored[:, : 9 - i - 2] = (segments[:, i + 2 :] == segments[:, : 9 - i - 2]) & (segments[:, i + 2 :] > 0)
        assert scored.sum() > 5
        np.testing.assert_allclose(logits[i][scored], expected[i][scored], rtol=1e-4, atol=1e-4)


def test_the_model_is_the_same_with_blocks_and_without():
    config = CONFIGS["one block"]
    without, with_blocks = init_model(config, seed=1), init_model(config, ComputeConfig(mtp=True), seed=1)
    assert without.mtp is None and with_blocks.mtp is not None
    shared, whole = arrays(without), arrays(with_blocks)
    assert whole.keys() - shared.keys() == {path for path in whole if path.startswith("mtp/")}
    for path, value in shared.items():
        np.testing.assert_array_equal(whole[path], value, err_msg=path)
    ids = np.arange(12).reshape(2, 6)
    np.testing.assert_array_equal(with_blocks(ids).logits, without(ids).logits)
    assert init_model(tiny_moe(), ComputeConfig(mtp=True)).mtp is None


@pytest.mark.parametrize(
    "config", [*CONFIGS.values(), preset("ernie-4.5-21b-a3b"), preset("ernie-4.5-300b-a47b")], ids=lambda c: str(c.hidden_size)
)
def test_parameters_are_those_of_the_formula(config):
    variables = variables_by_path(nnx.state(abstract_model(config, ComputeConfig(mtp=True))))
    found = sum(v.get_value().size for path, v in variables.items() if path.startswith("mtp/"))
    assert found == count_parameters(config).mtp > 0


def test_every_weight_is_sharded_by_its_logical_axes():
    config = CONFIGS["one block"]
    layout = make_layout(make_mesh(data=2, tensor=2, expert=2), config, "fsdp")
    variables = variables_by_path(nnx.state(abstract_model(config, ComputeConfig(mtp=True), layout)))
    specs = {path: tuple(layout.spec(logical_axes(v))) for path, v in variables.items() if path.startswith("mtp/block/")}
    rows = ("data", "expert")
    assert specs["mtp/block/projection/kernel"] == (None, rows)
    assert specs["mtp/block/layer/mlp/gate_up"] == (None, rows, None, "tensor")
    assert specs["mtp/block/layer/attention/o_proj"] == (None, "tensor", None, rows)
    assert all(part is None for part in specs["mtp/block/embedding_norm/scale"])


def test_vision_language_models_have_none():
    config = tiny_vl(num_nextn_predict_layers=1)
    assert abstract_model(config).mtp is None
    with pytest.raises(ValueError, match="multi-token prediction is of text models alone"):
        abstract_model(config, ComputeConfig(mtp=True))


def test_a_negative_number_of_blocks_is_refused():
    with pytest.raises(ValueError, match="num_nextn_predict_layers=-1"):
        tiny_moe(num_nextn_predict_layers=-1)
