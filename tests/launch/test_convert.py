"""launch/convert.py: the command itself, and what it makes of folders and runs."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from ernie_jax.checkpoint import TrainCheckpointer, load_pretrained
from ernie_jax.config import config_from_hf
from ernie_jax.config.data import DataConfig
from ernie_jax.config.optimization import OptimizerConfig
from ernie_jax.config.run import LossConfig, RunConfig
from ernie_jax.sharding import make_mesh
from ernie_jax.testing import tiny_moe
from ernie_jax.train import init_state, run_layout

SCRIPT = Path(__file__).parents[2] / "launch" / "convert.py"


def _module():
    spec = importlib.util.spec_from_file_location("convert", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["convert"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def convert(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    return _module()


def _same(folder, expected):
    got = {}
    for file in folder.glob("*.safetensors"):
        got |= load_file(file)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype
        np.testing.assert_array_equal(got[name].view(np.uint8), value.view(np.uint8), err_msg=name)


def test_command(golden, tmp_path):
    command = [sys.executable, str(SCRIPT), "--from", str(golden / "moe"), "--to", str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[1])}
    done = subprocess.run(
        [*command, "--max-shard-size", "300KB", "--json"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    assert first.startswith("From") and "Hugging Face weights in float32" in first
    result = json.loads(last)
    assert (result["parameters"], result["files"], result["dtype"]) == (366680, 5, "float32")
    assert result["bytes"] == sum(f.stat().st_size for f in (tmp_path / "out").glob("*.safetensors"))
    _same(tmp_path / "out", load_file(golden / "moe" / "model.safetensors"))


def test_vision_language(golden, tmp_path, convert):
    assert convert.main(["--from", str(golden / "vl"), "--to", str(tmp_path / "out")]) == 0
    _same(tmp_path / "out", load_file(golden / "vl" / "model.safetensors"))


def test_dtype_and_files_that_go_along(golden, tmp_path, convert, capsys):
    assert convert.main(["--from", str(golden / "moe"), "--to", str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("Wrote 366,680 parameters")
    tensors = load_file(golden / "moe" / "model.safetensors")
    router = ("mlp.gate.weight", "e_score_correction_bias")
    half = {k: v if k.endswith(router) else v.astype(ml_dtypes.bfloat16) for k, v in tensors.items()}
    _same(tmp_path / "half", half)
    generation = "generation_config.json"
    assert (tmp_path / "half" / generation).read_text() == (golden / "moe" / generation).read_text()
    # Without --dtype the format of the source stays.
    assert convert.main(["--from", str(tmp_path / "half"), "--to", str(tmp_path / "copy")]) == 0
    _same(tmp_path / "copy", half)


@pytest.mark.parametrize("ema_decay", [None, 0.9])
def test_from_a_run(golden, tmp_path, convert, ema_decay):
    run = RunConfig(
        model=config_from_hf(golden / "dense"),
        steps=10,
        batch_size=8,
        seq_len=8,
        data=DataConfig(kind="standard_library"),
        optimizer=OptimizerConfig(ema_decay=ema_decay),
    )
    state = init_state(run, run_layout(run, make_mesh(data=4, tensor=2)))
    if ema_decay is not None:
        state = dataclasses.replace(state, ema=jax.tree.map(lambda x: x + 1, state.ema))
    with TrainCheckpointer(tmp_path / "run" / "checkpoints") as checkpoints:
        checkpoints.save(3, state, {"config": run.to_dict(), "data": []})
    (tmp_path / "run" / "tokenizer").mkdir()
    (tmp_path / "run" / "tokenizer" / "tokenizer.json").write_text("{}")
    assert convert.main(["--from", str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 0
    model = load_pretrained(tmp_path / "out")
    expected = np.asarray(state.params["embed"]["embedding"].get_value()) + (0 if ema_decay is None else 1)
    np.testing.assert_array_equal(np.asarray(model.embed.embedding.get_value()), expected)
    assert (tmp_path / "out" / "tokenizer.json").exists()
    # A run's checkpoint is only read.
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["3"]


def test_blocks_of_multi_token_prediction_go_along_unless_dropped(tmp_path, convert, capsys):
    settings = {"steps": 5, "batch_size": 8, "seq_len": 8, "data": DataConfig(kind="standard_library")}
    run = RunConfig(model=tiny_moe(num_nextn_predict_layers=1), **settings)
    for name, source in (("run", run), ("none", dataclasses.replace(run, loss=LossConfig(mtp_weight=0.0)))):
        with TrainCheckpointer(tmp_path / name / "checkpoints") as checkpoints:
            checkpoints.save(1, init_state(source, run_layout(source, make_mesh(data=8))), {"config": source.to_dict(), "data": []})
    for flags, kept in ((), True), (("--mtp", "keep"), True), (("--mtp", "drop"), False):
        out = tmp_path / f"out_{len(flags)}_{kept}"
        assert convert.main(["--from", str(tmp_path / "run"), "--to", str(out), *flags]) == 0
        assert any("mtp" in name for name in load_file(out / "model.safetensors")) is kept
        assert ("num_nextn_predict_layers" in json.loads((out / "config.json").read_text())) is kept
    assert convert.main(["--from", str(tmp_path / "none"), "--to", str(tmp_path / "out"), "--mtp", "keep"]) == 2
    assert "trains no blocks of multi-token prediction" in capsys.readouterr().err


def test_user_errors(golden, tmp_path, convert, capsys):
    def error(*arguments):
        assert convert.main(list(arguments)) == 2
        return capsys.readouterr().err

    dense, out = str(golden / "dense"), str(tmp_path / "out")
    assert "no checkpoint folder at" in error("--from", str(tmp_path / "nowhere"), "--to", out)
    assert "max_shard_size='big'" in error("--from", dense, "--to", out, "--max-shard-size", "big")
    assert "are both" in error("--from", dense, "--to", dense)
    assert "is not a run" in error("--from", dense, "--to", out, "--step", "3")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert "has no whole checkpoint" in error("--from", str(tmp_path / "run"), "--to", out)
    assert not (tmp_path / "out").exists()
