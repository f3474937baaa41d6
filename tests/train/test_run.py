"""Whole runs in a folder: what they write, and that a run cut in pieces is the run in one piece, bit for bit."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from ernie_jax.config.run import EvalConfig, SampleConfig
from ernie_jax.testing import tiny_moe
from ernie_jax.train import train
from ernie_jax.train.records import read_records
from ernie_jax.train.resume import config_changes

ROOT = Path(__file__).parents[2]
MODEL = tiny_moe(num_hidden_layers=2, num_experts_per_tok=2, vocab_size=300)
STEPS = 100
# The same run as a recipe, for processes of its own.
RECIPE = """
from ernie_jax.config import default_config


def get_config():
    config = default_config()
    config.model.update({"preset": "quickstart", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48})
    config.model.update({"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8})
    config.model.update({"initializer_range": 0.2, "max_position_embeddings": 256})
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16, "num_shared_experts": 1, "layer_start": 1}
    config.model.moe = moe
    config.update({"steps": 100, "batch_size": 8, "seq_len": 12, "log_every": 1})
    config.mesh.data = 8
    config.schedule.warmup = 5
    config.data.update({"kind": "standard_library", "max_bytes": 300_000})
    config.checkpoint.update({"every": 20, "keep": 2})
    config.eval.update({"every": 50, "batches": 2})
    return config
"""


@pytest.fixture(scope="module")
def make_run(tiny_run):
    def make(**changes):
        sections = {"mesh": {"data": 8}, "schedule": {"warmup": 5}, "checkpoint": {"every": 20, "keep": 2}}
        data = type(tiny_run().data)(kind="standard_library", max_bytes=300_000)
        evaluation = EvalConfig(every=50, batches=2)
        return tiny_run(**{"model": MODEL, "steps": STEPS, "log_every": 1, "data": data, "eval": evaluation} | sections | changes)

    return make


@pytest.fixture(scope="module")
def straight(make_run, tmp_path_factory):
    """(result, folder, lines said) of the run in one piece."""
    folder, lines = tmp_path_factory.mktemp("straight"), []
    return train(make_run(), folder, say=lines.append), folder, lines


def history(folder):
    """Everything about each step that must not depend on how the run was cut."""
    keys = ("step", "loss", "total", "grad_norm", "lr", "aux", "tokens", "router", "eval_loss")
    return [{key: record.get(key) for key in keys} for record in read_records(folder / "metrics.jsonl")]


def names(folder):
    return {path.name for path in folder.iterdir()}


def weights(folder):
    return load_file(folder / "export" / "model.safetensors")


def assert_same_run(folder, reference):
    assert history(folder) == history(reference)
    got, want = weights(folder), weights(reference)
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


def test_a_run_leaves_its_folder_complete(straight):
    result, folder, lines = straight
    assert result.steps == STEPS and result.stopped is None and result.resumed_from is None
    assert json.loads((folder / "config.json").read_text())["model"]["moe"]["num_experts"] == 8
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names(folder / "export")
    assert Path(result.plot).read_bytes().startswith(b"\x89PNG")
    assert any(name.startswith("events.out.tfevents") for name in names(folder / "tensorboard"))
    assert sorted(int(p.name) for p in (folder / "checkpoints").iterdir() if p.name.isdigit()) == [80, 100]
    assert any("data 8" in line and "parameters" in line for line in lines)


def test_metrics_hold_a_record_a_step(straight):
    result, folder, _ = straight
    records = read_records(folder / "metrics.jsonl")
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    for record in records:
        assert {"loss", "grad_norm", "lr", "tokens_per_s", "mfu", "peak_flops", "router"} <= record.keys()
        assert np.shape(record["router"]["load"]) == (1, 8)
    assert [r["step"] for r in records if r.get("eval_loss") is not None] == [50, 100]
    assert result.loss == records[-1]["loss"] < records[0]["loss"] - 0.5
    assert result.eval_loss == records[-1]["eval_loss"]
    # The rate of a step is that of the steps before it: 0 at first, the peak once warm.
    assert [records[i]["lr"] for i in (0, 5)] == [0.0, pytest.approx(3e-4)]


def test_stops_leave_no_trace_in_the_run(straight, make_run, tmp_path):
    # Stops inside warm-up, in the middle and inside the decay (case 34), each by SIGTERM, which comes while sampling.
    for stop_at, resumed in ((2, None), (49, 3), (94, 50)):

        def stop(model, tokenizer, prompt, *, max_new_tokens):
            os.kill(os.getpid(), signal.SIGTERM)
            return "stop"

        result = train(make_run(sample=SampleConfig(every=stop_at, prompt="x")), tmp_path, generate=stop, say=lambda line: None)
        assert (result.stopped, result.steps, result.resumed_from) == ("SIGTERM", stop_at + 1, resumed)
    result = train(make_run(), tmp_path, say=lambda line: None)
    assert (result.stopped, result.steps, result.resumed_from) == (None, STEPS, 95)
    assert_same_run(tmp_path, straight[1])


def test_a_finished_run_says_so_and_gives_its_result(straight, make_run):
    lines = []
    again = train(make_run(), straight[1], say=lines.append)
    assert again == straight[0]
    assert any("already reached step 100 of 100" in line for line in lines)


def test_a_checkpoint_of_another_model_or_other_data_is_refused(straight, make_run):
    with pytest.raises(ValueError, match=r"another run:\n  config.model.rope_theta: 500000.0 -> 1000.0\n"):
        train(make_run(model=tiny_moe(num_hidden_layers=2, num_experts_per_tok=2, vocab_size=300, rope_theta=1000.0)), straight[1])
    with pytest.raises(ValueError, match="seed"):
        train(make_run(seed=1, steps=200), straight[1])


def test_changes_are_listed_by_key():
    old = {"steps": 3, "model": {"a": [1, 2], "moe": None}, "gone": 1}
    new = {"steps": 4, "model": {"a": (1, 2), "moe": {"k": 1}}}
    assert config_changes(old, new) == {"steps": (3, 4), "gone": (1, None), "model.moe.k": (None, 1)}


def launch(folder, recipe, *flags):
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir or ""),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    }
    command = [sys.executable, str(ROOT / "launch" / "train.py"), f"--config={recipe}", f"--workdir={folder}", *flags]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_step(process, folder, step, limit=300.0):
    """Until the metrics have reached a step; the process must still be running."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        assert process.poll() is None, process.communicate()
        path = folder / "metrics.jsonl"
        if path.exists() and path.read_bytes().count(b"\n") >= step:
            return
        time.sleep(0.005)
    raise AssertionError(f"step {step} was not reached in {limit} s")


def test_killed_processes_go_on_to_the_same_end(straight, tmp_path):
    # Case 38: SIGTERM saves and ends with 0; kill -9 loses only what follows the last checkpoint.
    recipe, folder = tmp_path / "recipe.py", tmp_path / "run"
    recipe.write_text(RECIPE)
    process = launch(folder, recipe)
    wait_for_step(process, folder, 7)
    process.terminate()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "Stopped by SIGTERM after step" in out
    process = launch(folder, recipe)
    wait_for_step(process, folder, 43)
    process.kill()
    process.communicate(timeout=60)
    process = launch(folder, recipe, "--json")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    result = json.loads(out.splitlines()[-1])
    assert result["resumed_from"] in (20, 40, 60)
    assert result["loss"] == straight[0].loss
    assert_same_run(folder, straight[1])


def test_mistakes_end_with_one_line_and_code_2(tmp_path):
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE)
    process = launch(tmp_path / "run", recipe, "--config.batch_size=7")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "error: batch_size=7 cannot be split" in err and "Traceback" not in err + out
