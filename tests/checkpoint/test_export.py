"""Export in the published layout: every bit back, files and index in step, nothing half done."""

import json
import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file

from ernie_jax.checkpoint import load_pretrained, save_pretrained
from ernie_jax.checkpoint.export import parse_size
from ernie_jax.checkpoint.host_blocks import cut_on_device
from ernie_jax.config import ComputeConfig
from ernie_jax.models import init_model
from ernie_jax.sharding import make_mesh, variables_by_path
from ernie_jax.testing import tiny_moe

_INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("name", ["dense", "moe", "moe_noshared", "vl"])
@pytest.mark.parametrize("on_mesh", [False, True])
def test_every_bit_comes_back(golden, tmp_path, name, on_mesh, read_folder, assert_same_bits):
    model = load_pretrained(golden / name, mesh=make_mesh(data=2, tensor=2, expert=2) if on_mesh else None, rules="fsdp")
    expected = load_file(golden / name / "model.safetensors")
    save_pretrained(model, tmp_path / "one")
    assert sorted(p.name for p in (tmp_path / "one").iterdir()) == ["config.json", "generation_config.json", "model.safetensors"]
    assert_same_bits(read_folder(tmp_path / "one"), expected)
    save_pretrained(model, tmp_path / "many", max_shard_size=150_000)
    _check_index(tmp_path / "many", expected, at_least=3, limit=150_000)
    assert_same_bits(read_folder(tmp_path / "many"), expected)
    assert_same_bits(_exported(load_pretrained(tmp_path / "many"), tmp_path / "again", read_folder), expected)


def _exported(model, folder, read_folder, **options):
    save_pretrained(model, folder, **options)
    return read_folder(folder)


def _check_index(folder, expected, *, at_least, limit):
    index = json.loads((folder / _INDEX).read_text())
    files = sorted(p.name for p in folder.glob("*.safetensors"))
    assert len(files) >= at_least
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in expected.values())
    found = {}
    for file in files:
        part = load_file(folder / file)
        assert len(part) == 1 or sum(t.nbytes for t in part.values()) <= limit
        with safe_open(folder / file, "numpy") as tensors:
            assert tensors.metadata() == {"format": "pt"}
        found |= dict.fromkeys(part, file)
    assert found == index["weight_map"]


def test_config_is_what_transformers_wrote(golden, tmp_path):
    save_pretrained(load_pretrained(golden / "moe"), tmp_path / "out")
    for name in ("config.json", "generation_config.json"):
        expected, got = (json.loads((folder / name).read_text()) for folder in (golden / "moe", tmp_path / "out"))
        assert {key: expected[key] for key in got} == got
    assert got == {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@pytest.mark.parametrize("on_mesh", [False, True])
def test_bfloat16_round_trip_keeps_gate_and_bias(spoilable, tmp_path, on_mesh, read_folder, assert_same_bits):
    source = spoilable("moe").in_bfloat16()
    mesh = make_mesh(data=2, tensor=2, expert=2) if on_mesh else None
    model = load_pretrained(source.write(files=4), dtype="bfloat16", mesh=mesh)
    assert_same_bits(_exported(model, tmp_path / "out", read_folder), source.tensors)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    # The same through float32 weights, asked for by name.
    wide = load_pretrained(source.path)
    assert_same_bits(_exported(wide, tmp_path / "wide", read_folder, dtype="bfloat16"), source.tensors)


def test_small_runs_of_rows(golden, tmp_path, monkeypatch, read_folder, assert_same_bits):
    for name in ("_SMALLEST_RUN", "_LARGEST_RUN"):
        monkeypatch.setattr(f"ernie_jax.checkpoint.export.{name}", 1000)
    model = load_pretrained(golden / "moe")
    assert_same_bits(_exported(model, tmp_path / "out", read_folder), load_file(golden / "moe" / "model.safetensors"))


def test_head(golden, tmp_path, read_folder):
    tied = _exported(load_pretrained(golden / "moe"), tmp_path / "tied", read_folder)
    assert "lm_head.weight" not in tied
    assert json.loads((tmp_path / "tied" / "config.json").read_text())["tie_word_embeddings"] is True
    untied = _exported(load_pretrained(golden / "moe_noshared"), tmp_path / "untied", read_folder)
    assert not np.array_equal(untied["lm_head.weight"], untied["model.embed_tokens.weight"])
    assert json.loads((tmp_path / "untied" / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize("size", ["5GB", 300_000])
def test_mtp_kept_or_dropped(spoilable, tmp_path, size, read_folder, assert_same_bits):
    source = spoilable("moe").in_bfloat16()
    source.config["num_nextn_predict_layers"] = 1
    source.tensors["model.mtp_linear_proj.0.weight"] = np.arange(64 * 128).reshape(64, 128).astype(ml_dtypes.bfloat16)
    source.tensors["model.mtp_emb_norm.0.weight"] = np.linspace(0, 1, 64, dtype=np.float32)
    folder = source.write()
    kept = _exported(load_pretrained(folder, mtp="keep"), tmp_path / "kept", read_folder, dtype="bfloat16", max_shard_size=size)
    assert_same_bits(kept, source.tensors)
    assert json.loads((tmp_path / "kept" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    dropped = _exported(load_pretrained(folder), tmp_path / "dropped", read_folder)
    assert dropped.keys() == {name for name in source.tensors if "mtp" not in name}
    # No promise of a block that is not there.
    assert "num_nextn_predict_layers" not in json.loads((tmp_path / "dropped" / "config.json").read_text())


@pytest.mark.parametrize("blocks", [1, 2])
def test_mtp_blocks_come_back_bit_for_bit_under_their_published_names(blocks, tmp_path, read_folder, assert_same_bits):
    model = init_model(tiny_moe(num_nextn_predict_layers=blocks), ComputeConfig(mtp=True), seed=4)
    tensors = _exported(model, tmp_path / "out", read_folder)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == blocks
    projections = {f"self_attn.{p}_proj.weight" for p in "qkvo"} | {f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
    layer = projections | {"input_layernorm.weight", "post_attention_layernorm.weight"}
    assert {name for name in tensors if "mtp" in name} == {
        *(f"model.mtp_{part}.{i}.weight" for part in ("emb_norm", "hidden_norm", "linear_proj") for i in range(blocks)),
        *(f"model.mtp_block.{i}.{name}" for name in layer for i in range(blocks)),
    }
    for i in range(blocks):
        kernel = np.asarray(model.mtp.block.projection.kernel[...])[i]
        np.testing.assert_array_equal(tensors[f"model.mtp_linear_proj.{i}.weight"], kernel.T)
        assert tensors[f"model.mtp_block.{i}.self_attn.k_proj.weight"].shape == (16, 32)
    mesh = make_mesh(data=2, tensor=2, expert=2)
    again = load_pretrained(tmp_path / "out", mtp="load", mesh=mesh, rules="fsdp")
    assert_same_bits(_exported(again, tmp_path / "again", read_folder), tensors)
    kept = load_pretrained(tmp_path / "out", mtp="keep")
    assert_same_bits(_exported(kept, tmp_path / "kept", read_folder), tensors)
    without = load_pretrained(tmp_path / "out")
    assert without.mtp is None
    rest = {name: value for name, value in tensors.items() if "mtp" not in name}
    assert_same_bits(_exported(without, tmp_path / "without", read_folder), rest)


def test_mtp_that_is_not_there_cannot_be_loaded(golden, spoilable):
    with pytest.raises(ValueError, match=r"mtp='load', but its config.json has no num_nextn_predict_layers above 0"):
        load_pretrained(golden / "moe", mtp="load")
    source = spoilable("moe")
    source.config["num_nextn_predict_layers"] = 1
    with pytest.raises(ValueError, match=r"missing: model.mtp_linear_proj.0.weight"):
        load_pretrained(source.write(), mtp="load")


def test_mtp_source_gone(spoilable, tmp_path):
    source = spoilable("moe")
    source.tensors["model.mtp_emb_norm.0.weight"] = np.ones(64, np.float32)
    model = load_pretrained(source.write(), mtp="keep")
    del source.tensors["model.mtp_emb_norm.0.weight"]
    source.write()
    with pytest.raises(ValueError, match=r"no longer has model.mtp_emb_norm.0.weight"):
        save_pretrained(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_replaces_an_earlier_export_and_leaves_other_files(golden, tmp_path, read_folder, assert_same_bits):
    model, out = load_pretrained(golden / "dense"), tmp_path / "out"
    expected = load_file(golden / "dense" / "model.safetensors")
    save_pretrained(model, out, max_shard_size="100KB")
    (out / "tokenizer.json").write_text("{}")
    for size in (50_000, "1GiB", 50_000):
        save_pretrained(model, out, max_shard_size=size)
        assert_same_bits(read_folder(out), expected)
        load_pretrained(out)
    assert (out / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "out.partial").exists()


_SLOW_EXPORT = """
import sys, time
import ernie_jax.checkpoint.hub_source as hub_source
from ernie_jax.checkpoint import load_pretrained, save_pretrained
produce = hub_source.HubSource.produce
def slowly(self, entry):
    print(entry.name, flush=True)
    time.sleep(0.02)
    yield from produce(self, entry)
hub_source.HubSource.produce = slowly
save_pretrained(load_pretrained(sys.argv[1]), sys.argv[2], max_shard_size=150_000)
"""


@pytest.mark.parametrize("earlier", [False, True])
def test_killed_in_the_middle(golden, tmp_path, earlier, read_folder, assert_same_bits):
    out = tmp_path / "out"
    model, expected = load_pretrained(golden / "dense"), load_file(golden / "dense" / "model.safetensors")
    if earlier:
        save_pretrained(model, out)
    environment = os.environ | {"XLA_FLAGS": ""}
    command = [sys.executable, "-c", _SLOW_EXPORT, str(golden / "dense"), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        for _ in range(20):
            assert process.stdout.readline()
        time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert not list(tmp_path.rglob(_INDEX))
    assert not list((tmp_path / "out.partial").glob("config.json"))
    if earlier:
        assert_same_bits(read_folder(out), expected)
    else:
        assert not out.exists()
    save_pretrained(model, out, max_shard_size=150_000)
    assert_same_bits(read_folder(out), expected)
    assert not (tmp_path / "out.partial").exists()


def test_part_of_an_array_is_cut_where_it_lives():
    array = jnp.arange(60.0).reshape(3, 4, 5)
    np.testing.assert_array_equal(np.asarray(cut_on_device(array, [1, 2, 0], (1, 2, 3))), np.asarray(array)[1:2, 2:4, :3])


def test_negative_zero_and_nan_survive(golden, tmp_path, read_folder):
    model = load_pretrained(golden / "dense", mesh=make_mesh(data=2, tensor=2, expert=2))
    variable = variables_by_path(nnx.state(model))["norm/scale"]
    bits = np.frombuffer(np.array([0x80000000, 0x7FC00123] * 32, np.uint32).tobytes(), np.float32)
    model.norm.scale.set_value(jax.device_put(bits, variable.get_value().sharding))
    out = _exported(model, tmp_path / "out", read_folder)
    np.testing.assert_array_equal(out["model.norm.weight"].view(np.uint32), bits.view(np.uint32))


def test_sizes():
    assert parse_size("5GB") == 5 * 10**9
    assert parse_size("1.5 MiB") == 3 << 19
    assert parse_size(7) == 7
    for bad in ("5", "five GB", 0, -1, 2.5, True, "0GB"):
        with pytest.raises(ValueError, match="max_shard_size"):
            parse_size(bad)


def test_user_errors(golden, tmp_path):
    model = load_pretrained(golden / "dense")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="it is a file; give a folder"):
        save_pretrained(model, tmp_path / "file")
    with pytest.raises(ValueError, match="dtype='int8'; weights are stored as one of"):
        save_pretrained(model, tmp_path / "out", dtype="int8")
