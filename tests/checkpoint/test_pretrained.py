"""Import of published checkpoints: values, places, and everything that can be wrong with a folder."""

import json
import logging

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from ernie_jax.checkpoint import load_pretrained
from ernie_jax.sharding import make_mesh, variables_by_path


def _arrays(model):
    return {path: v.get_value() for path, v in variables_by_path(nnx.state(model)).items()}


@pytest.mark.parametrize(
    ("name", "sizes"), [("dense", None), ("moe", None), ("moe_noshared", None), ("moe", {"data": 2, "tensor": 2, "expert": 2})]
)
def test_golden_logits(golden, name, sizes):
    model = load_pretrained(golden / name, mesh=None if sizes is None else make_mesh(**sizes))
    io = load_file(golden / name / "io.safetensors")
    logits = np.asarray(model(io["input_ids"]).logits)
    np.testing.assert_allclose(logits, io["logits"], atol=1e-4, rtol=1e-4)
    if sizes:
        return
    out = model(io["input_ids"], output_hidden_states=True)
    for i, hidden in enumerate(out.hidden_states):
        np.testing.assert_allclose(hidden, io[f"hidden_{i}"], atol=1e-4, rtol=1e-4)
    for i, router in enumerate(out.router):
        np.testing.assert_allclose(router.logits.reshape(-1, 8), io[f"router_{i}"], atol=1e-4, rtol=1e-4)
    assert len(out.router) == sum(key.startswith("router_") for key in io)
    masked = model(io["input_ids"], attention_mask=io["attention_mask"], position_ids=io["position_ids"]).logits
    valid = io["attention_mask"].astype(bool)
    np.testing.assert_allclose(np.asarray(masked)[valid], io["logits_masked"][valid], atol=1e-4, rtol=1e-4)


def test_every_device_holds_its_part(golden):
    model = load_pretrained(golden / "moe", mesh=make_mesh(data=2, tensor=2, expert=2), rules="fsdp")
    gate_up = _arrays(model)["decoder/segments/1/layers/0/moe/experts/gate_up"]
    assert gate_up.addressable_shards[0].data.shape == (3, 4, 32, 2, 24)
    alone = _arrays(load_pretrained(golden / "moe"))
    for path, array in _arrays(model).items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(alone[path]), err_msg=path)


def test_large_arrays_come_in_pieces(golden, monkeypatch):
    monkeypatch.setattr("ernie_jax.checkpoint.pretrained._SMALLEST_PIECE", 100_000)
    monkeypatch.setattr("ernie_jax.checkpoint.pretrained._PIECES_A_FILE", 1 << 20)
    whole = load_file(golden / "moe" / "model.safetensors")
    arrays = _arrays(load_pretrained(golden / "moe"))
    experts = np.asarray(arrays["decoder/segments/1/layers/0/moe/experts/gate_up"])
    np.testing.assert_array_equal(experts[2, 7, :, 1].T, whole["model.layers.3.mlp.experts.7.up_proj.weight"])
    np.testing.assert_array_equal(np.asarray(arrays["embed/embedding"]), whole["model.embed_tokens.weight"])


def test_experts_in_numeric_order_gate_before_up(spoilable):
    source = spoilable("moe")
    source.config["moe_num_experts"] = 16
    for layer in (1, 2, 3):
        prefix = f"model.layers.{layer}.mlp."
        source.tensors[f"{prefix}gate.weight"] = np.zeros((16, 64), np.float32)
        source.tensors[f"{prefix}moe_statics.e_score_correction_bias"] = np.arange(16, dtype=np.float32)[None]
        for expert in range(16):
            for part, shape, extra in (("gate", (48, 64), 0.25), ("up", (48, 64), 0.5), ("down", (64, 48), 0)):
                source.tensors[f"{prefix}experts.{expert}.{part}_proj.weight"] = np.full(shape, expert + extra, np.float32)
    arrays = _arrays(load_pretrained(source.write()))
    moe = "decoder/segments/1/layers/0/moe/"
    for expert in range(16):
        assert (arrays[f"{moe}experts/gate_up"][:, expert, :, 0] == expert + 0.25).all()
        assert (arrays[f"{moe}experts/gate_up"][:, expert, :, 1] == expert + 0.5).all()
        assert (arrays[f"{moe}experts/down"][:, expert] == expert).all()
    assert (arrays[f"{moe}router/bias"] == np.arange(16)).all()


def test_bfloat16_keeps_gate_and_bias(spoilable):
    source = spoilable("moe")
    bias = np.linspace(0.1, 0.9, 8, dtype=np.float32)[None]
    source.tensors["model.layers.2.mlp.moe_statics.e_score_correction_bias"] = bias
    arrays = _arrays(load_pretrained(source.in_bfloat16().write(), dtype="bfloat16"))
    router = "decoder/segments/1/layers/0/moe/router/"
    assert {path: a.dtype for path, a in arrays.items() if a.dtype != jnp.bfloat16} == {
        f"{router}gate": jnp.float32,
        f"{router}bias": jnp.float32,
    }
    np.testing.assert_array_equal(np.asarray(arrays[f"{router}bias"])[1], bias[0])
    np.testing.assert_array_equal(np.asarray(arrays[f"{router}gate"])[0], source.tensors["model.layers.1.mlp.gate.weight"])
    np.testing.assert_array_equal(np.asarray(arrays["norm/scale"]), source.tensors["model.norm.weight"])


def test_vision_tower_at_the_root_as_in_the_original_files(spoilable, golden):
    source = spoilable("vl")
    source.tensors = {
        name.removeprefix("model.") if name.startswith("model.vision_model.") else name: value
        for name, value in source.tensors.items()
    }
    here, there = (variables_by_path(nnx.state(load_pretrained(f))) for f in (source.write(), golden / "vl"))
    assert here.keys() == there.keys()
    for path, variable in here.items():
        np.testing.assert_array_equal(variable[...], there[path][...], err_msg=path)


def test_no_shared_experts_and_no_field(spoilable, golden):
    source = spoilable("moe_noshared")
    del source.config["moe_num_shared_experts"]
    model = load_pretrained(source.write())
    assert model.config.moe.num_shared_experts == 0
    io = load_file(golden / "moe_noshared" / "io.safetensors")
    np.testing.assert_allclose(np.asarray(model(io["input_ids"]).logits), io["logits"], atol=1e-4, rtol=1e-4)


def test_shared_experts_of_the_files_win(spoilable):
    source = spoilable("moe")
    del source.config["moe_num_shared_experts"]
    assert load_pretrained(source.write()).config.moe.num_shared_experts == 2


def test_all_that_does_not_fit_is_listed_at_once(spoilable):
    source = spoilable("moe")
    source.tensors["model.layers.2.self_attn.query_proj.weight"] = source.tensors.pop("model.layers.2.self_attn.q_proj.weight")
    del source.tensors["model.layers.1.mlp.shared_experts.up_proj.weight"]
    source.tensors["model.layers.1.mlp.experts.8.up_proj.weight"] = np.zeros((48, 64), np.float32)
    source.tensors["model.norm.weight"] = np.zeros(63, np.float32)
    source.tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((160, 64), np.int8)
    source.tensors["zzz"] = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match="7 tensors do not fit") as error:
        load_pretrained(source.write())
    lines = str(error.value).splitlines()[1:]
    shared, query = "model.layers.1.mlp.shared_experts.up_proj.weight", "model.layers.2.self_attn.q_proj.weight"
    renamed, expert = "model.layers.2.self_attn.query_proj.weight", "model.layers.1.mlp.experts.{}.up_proj.weight"
    assert lines == [
        f"  missing: {shared} (perhaps stored as: {expert.format(8)})",
        f"  missing: {query} (perhaps stored as: {renamed})",
        f"  unexpected: {expert.format(8)} (nearest expected name: {expert.format(0)})",
        f"  unexpected: {renamed} (nearest expected name: {query})",
        "  unexpected: zzz",
        "  wrong shape: model.norm.weight has [63], expected [64]",
        "  wrong format: model.layers.0.mlp.up_proj.weight is I8, expected one of F32, BF16, F16, F64",
    ]


class TestHead:
    def test_untied(self, golden):
        arrays = _arrays(load_pretrained(golden / "moe_noshared"))
        assert not np.array_equal(np.asarray(arrays["lm_head/kernel"]), np.asarray(arrays["embed/embedding"]))

    def test_flag_false_without_head(self, spoilable):
        source = spoilable("dense")
        source.config["tie_word_embeddings"] = False
        with pytest.raises(ValueError, match=r"tie_word_embeddings is false, but the checkpoint has no lm_head.weight"):
            load_pretrained(source.write())

    def test_flag_true_with_another_head(self, spoilable):
        source = spoilable("dense")
        source.tensors["lm_head.weight"] = source.tensors["model.embed_tokens.weight"] + 1
        with pytest.raises(ValueError, match=r"lm_head.weight \[128, 64\] differs from model.embed_tokens.weight"):
            load_pretrained(source.write())

    def test_flag_true_with_the_same_head(self, spoilable):
        source = spoilable("dense")
        source.tensors["lm_head.weight"] = source.tensors["model.embed_tokens.weight"].copy()
        model = load_pretrained(source.write())
        assert model.config.tie_word_embeddings
        assert model.lm_head is None

    def test_no_flag(self, spoilable):
        source = spoilable("moe_noshared")
        del source.config["tie_word_embeddings"]
        assert not load_pretrained(source.write()).config.tie_word_embeddings


class TestMtp:
    @pytest.fixture
    def with_mtp(self, spoilable):
        source = spoilable("moe")
        source.config["num_nextn_predict_layers"] = 1
        source.tensors["model.mtp_linear_proj.0.weight"] = np.ones((64, 128), ml_dtypes.bfloat16)
        source.tensors["model.mtp_emb_norm.0.weight"] = np.ones(64, np.float32)
        return source

    def test_dropped_and_said(self, with_mtp, caplog):
        with caplog.at_level(logging.INFO):
            load_pretrained(with_mtp.write())
        assert "2 multi-token-prediction tensors are dropped" in caplog.text

    def test_kept_model_runs(self, with_mtp, golden):
        model = load_pretrained(with_mtp.write(), mtp="keep")
        io = load_file(golden / "moe" / "io.safetensors")
        np.testing.assert_allclose(np.asarray(model(io["input_ids"]).logits), io["logits"], atol=1e-4, rtol=1e-4)

    def test_unknown_choice(self, golden):
        with pytest.raises(ValueError, match="mtp='train'; expected 'drop', 'load' or 'keep'"):
            load_pretrained(golden / "moe", mtp="train")


class TestBrokenFolders:
    def test_no_folder(self, tmp_path):
        with pytest.raises(ValueError, match="no checkpoint folder at"):
            load_pretrained(tmp_path / "nowhere")

    def test_no_config(self, spoilable):
        folder = spoilable("dense").write()
        (folder / "config.json").unlink()
        with pytest.raises(ValueError, match=r"no Hugging Face configuration at .*config.json"):
            load_pretrained(folder)

    def test_no_weights(self, spoilable):
        folder = spoilable("dense").write()
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        with pytest.raises(ValueError, match=r"neither model.safetensors nor .*; found pytorch_model.bin"):
            load_pretrained(folder)

    @pytest.mark.parametrize("keep", [0, 5, 300, -1])
    def test_truncated_file(self, spoilable, keep):
        folder = spoilable("dense").write(files=3)
        file = folder / "model-00002-of-00003.safetensors"
        file.write_bytes(file.read_bytes()[:keep])
        with pytest.raises(ValueError, match=r"model-00002-of-00003.safetensors is truncated or not a safetensors file"):
            load_pretrained(folder)

    def test_missing_file(self, spoilable):
        folder = spoilable("dense").write(files=3)
        (folder / "model-00002-of-00003.safetensors").unlink()
        with pytest.raises(ValueError, match=r"names 3 files, of which these are missing: model-00002-of-00003.safetensors"):
            load_pretrained(folder)

    def test_index_that_disagrees(self, spoilable):
        folder = spoilable("dense").write(files=2)
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        name = "model.norm.weight"
        other = {"model-00001-of-00002.safetensors": "model-00002-of-00002.safetensors"}
        index["weight_map"][name] = other.get(index["weight_map"][name], *other)
        del index["weight_map"]["model.embed_tokens.weight"]
        path.write_text(json.dumps(index))
        with pytest.raises(ValueError, match=r"disagrees with its files on 2 tensors: model.norm.weight") as error:
            load_pretrained(folder)
        assert "model.embed_tokens.weight (index: nowhere, found: model-0000" in str(error.value)

    def test_index_that_is_no_json(self, spoilable):
        folder = spoilable("dense").write(files=2)
        (folder / "model.safetensors.index.json").write_text('{"weight_map": ')
        with pytest.raises(ValueError, match="is not an index of safetensors files"):
            load_pretrained(folder)

    def test_one_file_and_an_index(self, spoilable):
        source = spoilable("dense")
        source.write(files=2)
        with pytest.raises(ValueError, match=r"has both model\.safetensors and"):
            load_pretrained(source.write())

    def test_unknown_option(self, golden):
        with pytest.raises(ValueError, match="no option 'atention' \\(did you mean 'attention'"):
            load_pretrained(golden / "dense", atention="dense")

    def test_one_tensor_under_two_names(self, spoilable):
        source = spoilable("vl")
        source.tensors["vision_model.ln.bias"] = source.tensors["model.vision_model.ln.bias"]
        with pytest.raises(ValueError, match=r"vision_model\.ln\.bias and model\.vision_model\.ln\.bias are two names"):
            load_pretrained(source.write())
