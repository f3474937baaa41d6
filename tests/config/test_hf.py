import json
import logging
from dataclasses import replace

import pytest
from safetensors import safe_open

from ernie_jax.config import PRESETS, config_from_hf, config_to_hf, preset

GOLDEN = ("dense", "moe", "moe_noshared", "vl")


def load(golden, name):
    return json.loads((golden / name / "config.json").read_text())


def tensors(golden, name):
    with safe_open(golden / name / "model.safetensors", framework="np") as file:
        return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 (not a dict)


def without(values, *keys):
    return {key: value for key, value in values.items() if key not in keys}


@pytest.mark.parametrize("name", GOLDEN)
def test_files_of_transformers_come_back_as_they_were(golden, name):
    want = without(load(golden, name), "transformers_version")
    assert config_to_hf(config_from_hf(golden / name), dtype="float32") == want
    # What the tensors say agrees with what these files say.
    assert config_from_hf(golden / name, tensor_names=tensors(golden, name)) == config_from_hf(golden / name)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_the_file(name):
    assert config_from_hf(json.loads(json.dumps(config_to_hf(preset(name))))) == preset(name)


def test_read_values(golden):
    moe = config_from_hf(golden / "moe")
    assert (moe.num_hidden_layers, moe.head_dim, moe.max_position_embeddings, moe.tie_word_embeddings) == (4, 16, 512, True)
    assert moe.moe is not None and moe.moe.shared_intermediate_size == 96
    assert moe.layer_kinds == ("dense", "moe", "moe", "moe")
    assert config_from_hf(golden / "moe_noshared").layer_kinds == ("dense", "dense", "moe", "moe")
    vl = config_from_hf(golden / "vl")
    assert vl.moe is not None and (vl.moe.intermediate_size, vl.moe.vision_intermediate_size) == (48, 24)
    assert vl.vision is not None and (vl.vision.depth, vl.vision.patch_size, vl.vision.video_end_token_id) == (2, 4, 125)
    assert vl.mrope_section == (6, 6, 4)


def test_no_field_is_read_as_its_default(golden):
    # In the reference files several fields equal the defaults; here none does.
    text = {"moe_norm_min": 1e-9, "rms_norm_eps": 1e-4, "initializer_range": 0.5, "pad_token_id": 7, "bos_token_id": 8}
    text |= {
        "eos_token_id": 9,
        "hidden_act": "gelu",
        "moe_layer_interval": 2,
        "moe_layer_end_index": 2,
        "num_nextn_predict_layers": 2,
    }
    text |= {"rope_parameters": {"rope_theta": 77.0, "rope_type": "default"}}
    changed = without(load(golden, "moe"), "transformers_version") | text
    assert config_to_hf(config_from_hf(changed), dtype="float32") == changed

    vl = without(load(golden, "vl"), "transformers_version")
    vl["vision_config"] |= {"in_channels": 4, "hidden_act": "relu", "rms_norm_eps": 1e-3, "spatial_merge_size": 3}
    vl["vision_config"] |= {"rope_parameters": {"rope_theta": 99.0, "rope_type": "axial"}}
    assert config_to_hf(config_from_hf(vl), dtype="float32") == vl


def test_the_file_itself_may_be_named(golden):
    assert config_from_hf(golden / "moe" / "config.json") == config_from_hf(str(golden / "moe"))


# Spellings


def test_old_spellings_give_the_same_model(golden):
    new = load(golden, "moe")
    old = without(new, "rope_parameters", "moe_num_experts", "moe_k") | {
        "rope_theta": 500000,
        "rope_scaling": None,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_layer_end_index": -1,
    }
    assert config_from_hf(old) == config_from_hf(new)
    assert config_from_hf(old | {"rope_theta": 10000.0}).rope_theta == 10000.0


def test_original_vision_language_file_is_flat_with_a_value_for_each_modality(golden):
    new = load(golden, "vl")
    text = without(new["text_config"], "mlp_layer_types", "rope_parameters", "model_type")
    tower = without(new["vision_config"], "spatial_merge_size", "temporal_merge_size", "intermediate_size", "rope_parameters")
    old = text | {
        "model_type": "ernie4_5_moe_vl",
        "moe_num_experts": [8, 8],
        "moe_layer_start_index": [2, 1],
        "moe_layer_end_index": [29, 28],
        "rope_theta": 500000,
        "freq_allocation": 4,
        "im_patch_id": 120,
        "spatial_conv_size": 2,
        "temporal_conv_size": 2,
        "vision_config": tower | {"mlp_ratio": 4},
        **{key: new[key] for key in new if key.endswith("_token_id") and key != "image_token_id"},
    }
    assert config_from_hf(old) == config_from_hf(new)
    with pytest.raises(ValueError, match=r"moe_num_experts=\[8, 16\]"):
        config_from_hf(old | {"moe_num_experts": [8, 16]})


def test_missing_mrope_section_means_the_published_one(golden):
    published = config_to_hf(preset("ernie-4.5-vl-28b-a3b"))
    del published["text_config"]["rope_parameters"]["mrope_section"]
    assert config_from_hf(published).mrope_section == (22, 22, 20)
    tiny = load(golden, "vl")
    del tiny["text_config"]["rope_parameters"]["mrope_section"]
    with pytest.raises(ValueError, match=r"mrope_section=\(22, 22, 20\).*head_dim / 2 = 16"):
        config_from_hf(tiny)


@pytest.mark.parametrize(("name", "head_dim"), [("dense", 128), ("moe", 16)])
def test_absent_head_dim_is_128_for_the_dense_class_and_a_share_for_the_others(golden, name, head_dim):
    assert config_from_hf(without(load(golden, name), "head_dim")).head_dim == head_dim


def test_explicit_head_dim_wins_in_every_class(golden):
    config = config_from_hf(load(golden, "moe") | {"head_dim": 32})
    assert config.head_dim == 32
    assert config_to_hf(config)["head_dim"] == 32


def test_layer_kinds_list_with_an_interval(golden):
    values = load(golden, "vl")
    values["text_config"]["mlp_layer_types"] = ["dense", "sparse", "dense", "sparse"]
    config = config_from_hf(values)
    assert config.layer_kinds == ("dense", "moe", "dense", "moe")
    assert config_to_hf(config)["text_config"]["mlp_layer_types"] == ["dense", "sparse", "dense", "sparse"]
    for kinds in (["sparse", "sparse", "dense", "sparse"], ["dense"] * 4, ["dense", "sparse"]):
        values["text_config"]["mlp_layer_types"] = kinds
        with pytest.raises(ValueError, match="mlp_layer_types"):
            config_from_hf(values)


# The weights decide (checkpoints with wrong or silent files)


def test_shared_experts_follow_the_tensors_when_the_file_is_silent(golden):
    silent = without(load(golden, "moe_noshared"), "moe_num_shared_experts")
    for names in (None, tensors(golden, "moe_noshared"), list(tensors(golden, "moe_noshared"))):
        config = config_from_hf(silent, tensor_names=names)
        assert config.moe is not None and config.moe.num_shared_experts == 0
    silent = without(load(golden, "moe"), "moe_num_shared_experts")
    config = config_from_hf(silent, tensor_names=tensors(golden, "moe"))
    assert config.moe is not None and config.moe.num_shared_experts == 2
    with pytest.raises(ValueError, match=r"has shared_experts tensors; pass their shapes"):
        config_from_hf(silent, tensor_names=list(tensors(golden, "moe")))


def test_shared_experts_follow_the_tensors_when_the_file_is_wrong(golden):
    # The class default of 2, written into the file of a model that has none.
    wrong = load(golden, "moe_noshared") | {"moe_num_shared_experts": 2}
    config = config_from_hf(wrong, tensor_names=tensors(golden, "moe_noshared"))
    assert config.moe is not None and config.moe.num_shared_experts == 0
    lone = {"model.layers.1.mlp.shared_experts.down_proj.weight": (64, 144)}
    config = config_from_hf(load(golden, "moe"), tensor_names=lone)
    assert config.moe is not None and config.moe.num_shared_experts == 3
    with pytest.raises(ValueError, match=r"width 100 are not a whole number of experts of width 48"):
        config_from_hf(load(golden, "moe"), tensor_names={"model.layers.1.mlp.shared_experts.up_proj.weight": (100, 64)})


def test_head_is_tied_unless_it_is_stored(golden, caplog):
    tied, untied = load(golden, "moe"), load(golden, "moe_noshared")
    shapes = tensors(golden, "moe") | {"lm_head.weight": (128, 64)}
    assert not config_from_hf(untied, tensor_names=tensors(golden, "moe_noshared")).tie_word_embeddings
    assert not config_from_hf(without(tied, "tie_word_embeddings"), tensor_names=shapes).tie_word_embeddings
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert not config_from_hf(tied, tensor_names=shapes).tie_word_embeddings
    assert "tie_word_embeddings is true beside a stored lm_head.weight" in caplog.text
    with pytest.raises(ValueError, match=r"tie_word_embeddings is false, but the checkpoint has no lm_head\.weight"):
        config_from_hf(untied, tensor_names=["model.embed_tokens.weight"])


def test_nested_tie_flag_obeys_the_same_rule(golden):
    values = load(golden, "vl")
    values["text_config"]["tie_word_embeddings"] = False
    with pytest.raises(ValueError, match=r"True at the top and False in text_config; pass `tensor_names`"):
        config_from_hf(values)
    assert not config_from_hf(values, tensor_names=tensors(golden, "vl") | {"lm_head.weight": (128, 64)}).tie_word_embeddings
    with pytest.raises(ValueError, match=r"has no lm_head\.weight"):
        config_from_hf(values, tensor_names=tensors(golden, "vl"))
    only_nested = without(values, "tie_word_embeddings")
    assert not config_from_hf(only_nested).tie_word_embeddings


# Errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "ernie4_5_mo"}, r"model_type='ernie4_5_mo' \(did you mean 'ernie4_5_moe'\?\); supported are ernie4_5, "),
        ({"model_type": None}, r"supported are ernie4_5, ernie4_5_moe, ernie4_5_vl_moe, ernie4_5_moe_vl"),
        ({"use_bias": True}, r"use_bias=True is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, r"rope_type='yarn' is not supported; expected default"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, r"rope_type='linear'"),
        ({"hidden_size": None}, r"lacks hidden_size"),
        ({"moe_k": None}, r"lacks moe_k \(or num_experts_per_tok\)"),
        ({"num_experts": 16}, r"'moe_num_experts': 8, 'num_experts': 16.*must be equal"),
        ({"vocab_size": "128"}, r"vocab_size='128' \(str\); expected int"),
        ({"tie_word_embeddings": 1}, r"tie_word_embeddings=1 \(int\); expected bool"),
        ({"hidden_act": "swish"}, r"hidden_act='swish'"),
        ({"moe_intermediate_size": [48, 24]}, r"moe_intermediate_size=\[48, 24\]; expected 1 width"),
        ({"scoring_func": "sigmoid"}, r"scoring_func='sigmoid' is not supported"),
    ],
)
def test_errors_name_the_file_and_the_key(golden, tmp_path, changes, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(load(golden, "moe") | changes))
    with pytest.raises(ValueError, match=message) as error:
        config_from_hf(tmp_path)
    assert str(path) in str(error.value)


def test_missing_or_broken_files(tmp_path):
    with pytest.raises(ValueError, match=r"no Hugging Face configuration at .*config\.json"):
        config_from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        config_from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"expected a JSON object, got list"):
        config_from_hf(tmp_path)


def test_bookkeeping_is_silent_and_other_unknown_keys_are_logged(golden, caplog):
    values = load(golden, "moe") | {"torch_dtype": "bfloat16", "moe_capacity": [64, 64, 64], "auto_map": {}, "moe_new_trick": 3}
    with caplog.at_level(logging.WARNING):
        assert config_from_hf(values) == config_from_hf(golden / "moe")
    assert [record.getMessage() for record in caplog.records] == [
        "config.json: keys without a meaning here are ignored: moe_new_trick"
    ]


def test_shapes_without_a_class_are_not_written(golden):
    vl = config_from_hf(golden / "vl")
    with pytest.raises(ValueError, match="text model with mrope_section"):
        config_to_hf(replace(vl, vision=None))
    with pytest.raises(ValueError, match="expected moe with vision_intermediate_size"):
        config_to_hf(replace(vl, moe=None))


def test_mtp_depth_and_dtype_are_written():
    values = config_to_hf(preset("ernie-4.5-21b-a3b"))
    assert (values["num_nextn_predict_layers"], values["dtype"], values["moe_layer_end_index"]) == (1, "bfloat16", 27)
    assert "head_dim" not in values
