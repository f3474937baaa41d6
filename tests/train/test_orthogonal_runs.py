"""Two runs of one seed, with and without the orthogonal loss: gate rows are less alike with it, and the picture shows it."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np

from ernie_jax.moe import gate_cosine
from ernie_jax.testing import multimodal_rows, tiny_vl
from ernie_jax.train.records import to_host
from ernie_jax.train.state import init_state
from ernie_jax.train.step import make_train_step

ROOT = Path(__file__).parents[2]
# Initialised as published models are: rows of 32 values far from orthogonal to each other.
MODEL = tiny_vl(num_hidden_layers=2, num_experts_per_tok=2, initializer_range=0.02)
GATES = ("router", "vision_router")


def test_mean_cosine_of_different_rows():
    gate = np.array([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]])
    # Pairs: 0, 1 / sqrt 2, 1 / sqrt 2.
    np.testing.assert_allclose(gate_cosine(jax.numpy.asarray(gate)), np.sqrt(2) / 3, rtol=1e-6)


def test_the_orthogonal_loss_parts_the_gates_of_both_modalities(tiny_run, layout_of, tmp_path):
    rows = multimodal_rows(MODEL)
    last = {}
    for name, coefficient in (("plain", 0.0), ("orthogonal", 1.0)):
        moe = {"orthogonal_coef": coefficient, "aux_loss_coef": 0.01}
        run = tiny_run(model=MODEL, batch_size=8, seq_len=24, moe=moe, schedule={"kind": "constant", "peak": 3e-3})
        layout = layout_of(run)
        state, step = init_state(run, layout), make_train_step(run, layout)
        (tmp_path / name).mkdir()
        with (tmp_path / name / "metrics.jsonl").open("w") as file:
            for number in range(1, 26):
                state, metrics = step(state, rows.batch(max_patches=224))
                record = {"step": number, **to_host(metrics)}
                file.write(json.dumps(record) + "\n")
        last[name] = record
    for gate in GATES:
        plain, orthogonal = (np.mean(last[name][gate]["gate_cosine"]) for name in ("plain", "orthogonal"))
        assert orthogonal < 0.8 * plain, gate
    command = [sys.executable, "launch/compare.py", "--runs", "plain", "orthogonal", "--json", "--out", "cosine.png", "--metrics"]
    command[1] = str(ROOT / command[1])
    done = subprocess.run(
        [*command, *(f"{gate}.gate_cosine" for gate in GATES)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["last"]["orthogonal"]["router.gate_cosine"] < told["last"]["plain"]["router.gate_cosine"]
    assert (tmp_path / "cosine.png").stat().st_size > 10_000
    wrong = subprocess.run([*command, "cosine"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert wrong.returncode == 1 and "no run has the metric 'cosine'; there are aux" in wrong.stderr
