import sys

import pytest
from absl import flags
from ml_collections import config_flags

from ernie_jax.config import config_to_hf, default_config, preset, run_config_from


def small(**changes):
    config = default_config()
    config.data.kind = "standard_library"
    for path, value in changes.items():
        node = config
        *sections, key = path.split("__")
        for section in sections:
            node = node[section]
        node[key] = value
    return config


def test_contract_keys_exist_with_defaults():
    config = default_config()
    for key in ("steps", "log_every", "dtype", "seed", "batch_size", "seq_len", "accumulate"):
        assert config[key] is not None
    assert set(config.mesh) >= {"data", "tensor", "pipeline", "expert"}
    assert set(config.checkpoint) >= {"every", "keep"}
    assert run_config_from(small()).model == preset("quickstart")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (small(mesh__expret=4), r"unknown key config\.mesh\.expret \(did you mean 'expert'\?\); config\.mesh has data, "),
        (small(stepz=4), r"unknown key config\.stepz \(did you mean 'steps'\?\)"),
        (small(weight_decay=0.1), r"unknown key config\.weight_decay \(did you mean 'config\.optimizer\.weight_decay'\?\)"),
        (small(model__presets="x"), r"unknown key config\.model\.presets \(did you mean 'preset'\?\)"),
        (small(model__moe__num_expert=4), r"unknown key config\.model\.moe\.num_expert \(did you mean 'num_experts'\?\)"),
        (small().to_dict() | {"steps": "ten"}, r"config\.steps='ten' \(str\); expected int"),
        (small().to_dict() | {"steps": True}, r"config\.steps=True \(bool\); expected int"),
        (small().to_dict() | {"mesh": 8}, r"config\.mesh=8; expected a section with keys \['data'"),
        (small(optimizer__clip_norm="big"), r"config\.optimizer\.clip_norm='big' \(str\); expected float \| None"),
        (
            small().to_dict() | {"data": {"kind": "standard_library", "paths": "a"}},
            r"config\.data\.paths='a' \(str\); expected a list",
        ),
        (small(remat=("qkv", 3)), r"config\.remat=\('qkv', 3\)"),
        (small(model__mrope_section=(1, 2)), r"config\.model\.mrope_section"),
        ({"steps": 1}, r"config\.model is missing"),
        ({"model": "quickstart", "steps": 1}, r"config lacks config\.batch_size, config\.seq_len, config\.data"),
        (small(model__preset="quickstrat"), r"neither a folder with a config\.json nor a preset \(did you mean 'quickstart'\?\)"),
    ],
)
def test_mistakes_name_the_key_what_was_got_and_what_was_expected(config, message):
    with pytest.raises(ValueError, match=message):
        run_config_from(config)


def test_model_fields_override_the_preset():
    model = run_config_from(small(model__num_hidden_layers=7, model__moe__num_experts=8, model__rope_theta=10000)).model
    base = preset("quickstart")
    assert model.moe is not None and base.moe is not None
    assert (model.num_hidden_layers, model.moe.num_experts, model.rope_theta) == (7, 8, 10000.0)
    assert (model.hidden_size, model.moe.intermediate_size) == (base.hidden_size, base.moe.intermediate_size)
    # A field of the preset that no longer fits is said with its path's own words.
    with pytest.raises(ValueError, match="num_experts_per_tok=2 is more than num_experts=1"):
        run_config_from(small(model__moe__num_experts=1))


def test_model_from_a_folder(golden):
    run = run_config_from(small(model__preset=str(golden / "moe"), model__num_hidden_layers=6))
    assert run.model.vocab_size == 128
    assert run.model.layer_kinds == ("dense",) + ("moe",) * 5
    with pytest.raises(ValueError, match=r"no Hugging Face configuration at .*golden/config\.json"):
        run_config_from(small(model__preset=str(golden)))
    assert config_to_hf(run.model)["num_hidden_layers"] == 6


def test_whole_model_may_be_spelled_out():
    plain = small().to_dict()
    shape = {"vocab_size": 64, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "head_dim": 4, "tie_word_embeddings": True}
    model = run_config_from(plain | {"model": shape}).model
    assert model.moe is None and model.num_hidden_layers == 2
    with pytest.raises(ValueError, match=r"unknown key config\.model\.moe\.experts"):
        run_config_from(plain | {"model": shape | {"moe": {"experts": 3}}})


def parse_flags(monkeypatch, *arguments):
    """A recipe as a script sees it, with overrides from the command line."""
    argv = ["train", *arguments]
    # config_flags reads which keys to override from the process's own arguments.
    monkeypatch.setattr(sys, "argv", argv)
    values = flags.FlagValues()
    holder = config_flags.DEFINE_config_dict("config", small(), flag_values=values)
    values(argv)
    return run_config_from(holder.value)


def test_flags_override_every_kind_of_key(monkeypatch):
    run = parse_flags(
        monkeypatch,
        "--config.mesh.expert=4",
        "--config.mesh.data=-1",
        "--config.model.num_hidden_layers=2",
        "--config.model.moe.num_experts=32",
        "--config.remat=('qkv','attn_out')",
        "--config.optimizer.clip_norm=None",
        "--config.optimizer.ema_decay=0.99",
        "--config.moe.capacity_factor=2",
        "--config.checkpoint.keep_every=50",
        "--config.data.paths=corpus/*.txt",
        "--config.data.tokenizer=some/folder",
        "--config.data.shuffle=false",
    )
    assert (run.mesh.expert, run.mesh.data, run.model.num_hidden_layers) == (4, -1, 2)
    assert run.model.moe is not None and run.model.moe.num_experts == 32
    assert (run.remat, run.optimizer.clip_norm, run.optimizer.ema_decay) == (("qkv", "attn_out"), None, 0.99)
    assert (run.moe.capacity_factor, run.checkpoint.keep_every) == (2.0, 50)
    assert (run.data.paths, run.data.tokenizer, run.data.shuffle) == (("corpus/*.txt",), "some/folder", False)


def test_flag_of_an_unknown_key_suggests_the_known_one(monkeypatch):
    with pytest.raises(AttributeError, match='Did you mean "expert"'):
        parse_flags(monkeypatch, "--config.mesh.expret=4")
