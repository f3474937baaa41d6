"""The vision-language demo as a user runs it, cut to a few steps: train, export, ask, draw."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = 3


def run(*command, **environment):
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vl") / "run"
    done = run(
        "launch/train.py",
        "--config=configs/quickstart_vl.py",
        f"--workdir={folder}",
        f"--config.steps={STEPS}",
        "--config.log_every=1",
        "--config.batch_size=8",
        "--config.data.max_bytes=150000",
        "--config.data.max_patches=320",
        "--config.eval.batches=2",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout.splitlines()[-1])


def test_metrics_are_told_for_each_modality(workdir):
    folder, result = workdir
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    for record in records:
        assert record["patches"] > 0 and 0 < record["vision_tokens"] < record["tokens"]
        assert {"loss_text", "loss_multimodal", "aux_vision", "z_vision", "orthogonal_vision"} <= record.keys()
        # Two MoE layers, of each modality's eight experts two a token.
        for name, tokens in (("router", record["tokens"] - record["vision_tokens"]), ("vision_router", record["vision_tokens"])):
            assert sum(record[name]["load"][0]) == sum(record[name]["load"][1]) == 2 * tokens
        assert record["image_imbalance"] <= record["image_imbalance_naive"]
    assert {"eval_loss", "eval_loss_text", "eval_loss_multimodal"} <= records[-1].keys()
    assert result["eval_loss"] == records[-1]["eval_loss"]


def test_the_export_answers_questions_about_images(workdir):
    folder, _ = workdir
    questions, picture = folder / "digits" / "heldout.jsonl", folder / "plots" / "answers.png"
    done = run(
        "launch/answers.py",
        f"--model={folder / 'export'}",
        f"--questions={questions}",
        f"--run={folder}",
        f"--picture={picture}",
        "--limit=5",
        "--batch-size=4",
        "--max-new-tokens=4",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    # Three steps teach nothing, but every question is answered and counted.
    assert result["questions"] == 5 and result["accuracy"] == result["right"] / 5
    assert result["eval_loss_multimodal"] > 0 and picture.stat().st_size > 5_000


def test_what_the_export_holds(workdir):
    export = workdir[0] / "export"
    names = {path.name for path in export.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "preprocessor_config.json"} <= names
    assert json.loads((export / "config.json").read_text())["architectures"] == ["Ernie4_5_VLMoeForConditionalGeneration"]


def test_questions_without_an_answer_are_refused(workdir, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps({"messages": [{"role": "user", "content": "?"}]}) + "\n")
    done = run("launch/answers.py", f"--model={workdir[0] / 'export'}", f"--questions={bad}")
    assert done.returncode == 1
    assert "expected a conversation that ends with a question and its answer, got roles ['user']" in done.stderr
