"""The table against the lists of tensors that transformers itself prints."""

import json

import pytest
from flax import nnx

from ernie_jax.checkpoint.hub_tensors import hub_tensors
from ernie_jax.config import config_from_hf
from ernie_jax.models import abstract_model
from ernie_jax.sharding import variables_by_path


def _tensors(config):
    variables = variables_by_path(nnx.state(abstract_model(config)))
    return hub_tensors(config, {path: v.shape for path, v in variables.items()}), variables


@pytest.mark.parametrize("name", ["dense", "moe", "moe_noshared", "vl"])
def test_names_and_shapes_of_the_published_layout(golden, name):
    tensors, _ = _tensors(config_from_hf(golden / name))
    expected = json.loads((golden / name / "shapes.json").read_text())["hub"]
    assert {key: list(t.shape) for key, t in tensors.items()} == expected


def test_only_gate_and_bias_are_float32(golden):
    tensors, _ = _tensors(config_from_hf(golden / "moe"))
    float32 = {name.split("mlp.")[1] for name, t in tensors.items() if t.float32}
    assert float32 == {"gate.weight", "moe_statics.e_score_correction_bias"}


def test_interleaved_layers_and_every_place_filled_once(golden):
    config = json.loads((golden / "moe" / "config.json").read_text())
    config |= {"num_hidden_layers": 6, "moe_layer_interval": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 5}
    tensors, variables = _tensors(config_from_hf(config))
    sparse = {name.split(".")[2] for name in tensors if "experts.0.gate_proj" in name}
    assert sparse == {"1", "3", "5"}
    filled = dict.fromkeys(variables, 0)
    for tensor in tensors.values():
        for block in tensor.blocks:
            size = 1
            for s in block.region(variables[block.path].shape):
                size *= s.stop - s.start
            filled[block.path] += size
    assert filled == {path: v.get_value().size for path, v in variables.items()}


def test_a_variable_without_a_row_is_named(golden):
    with pytest.raises(ValueError, match="no row for variable decoder/segments/0/layers/0/lora/a"):
        hub_tensors(config_from_hf(golden / "dense"), {"decoder/segments/0/layers/0/lora/a": (1, 2)})
