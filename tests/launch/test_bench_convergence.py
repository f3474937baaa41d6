"""`launch/bench.py convergence` and `precision` as a user runs them, for a step or two."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "launch" / "bench.py"
COMMAND = ()


def result_of(*arguments):
    done = subprocess.run([sys.executable, SCRIPT, *arguments, "--json"], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_rounded_exchange_is_held_against_the_plain_one_on_its_mesh():
    result = result_of("convergence", "--steps=2", "--last=1", "--devices=2", "--ways=exchange_fp8")
    plain, rounded = (result["ways"][name] for name in ("plain_expert", "exchange_fp8"))
    assert list(result["ways"]) == ["plain_expert", "exchange_fp8"]
    assert plain["differences"] == {"train_loss": [0], "eval_loss": [0]} and plain["bytes_to_plain"] == 1
    assert 0 < result["worst_difference"] == max(abs(d[0]) for d in rounded["differences"].values()) < 1e-3
    # Rows to the experts in 8 bits instead of 32; results and gradients as ever, and every other collective too.
    assert rounded["bytes"]["all-to-all"] < 0.85 * plain["bytes"]["all-to-all"]
    assert rounded["bytes"]["all-reduce"] == plain["bytes"]["all-reduce"]
    assert rounded["losses"][0]["skipped_steps"] == 0


def test_fp8_is_held_against_bfloat16():
    result = result_of("precision", "--steps=1", "--seeds=1", "--last=1")
    (pair,) = result["losses"]
    assert set(pair) == {"bfloat16", "fp8"} and pair["fp8"] != pair["bfloat16"]
    assert 0 < result["worst_difference"] < 1e-2
    assert result["temp_bytes"]["fp8"]["full"] < result["temp_bytes"]["fp8"]["expert_gate_up"]
    # The exact ratio is in tests/moe/test_fp8_memory.py; here it is the difference of two programs' buffers, which are packed anew.
    assert 0.25 < result["kept_ratio"] < 0.7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convergence", "--ways=exchange_fp4"], "exchange_fp4 unknown; expected a comma list of plain_expert, exchange_fp8"),
        (["convergence", "--devices=3"], "--devices 3: the recipe's 8 rows are split over 2, 4 or 8 devices"),
        (["convergence", "--steps=0"], "--steps must be at least 1, got 0"),
        (["precision", "--seeds=0"], "--seeds must be at least 1, got 0"),
    ],
)
def test_impossible_runs_are_refused_by_name(refused, arguments, message):
    assert message in refused(*arguments)
