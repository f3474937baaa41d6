"""`launch/bench.py decode` as a user runs it, at toy sizes: what it reports, not how fast it is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "launch" / "bench.py"
# Enough new tokens that their time stands out of what a call costs.
SIZES = {
    "hidden": 32,
    "layers": 2,
    "heads": 2,
    "kv-heads": 1,
    "head-dim": 16,
    "dense-width": 48,
    "experts": 8,
    "experts-per-token": 2,
    "width": 16,
    "vocab": 64,
    "repeats": 3,
    "prompt": 8,
    "new": 200,
}
SMALL = [f"--{name}={size}" for name, size in SIZES.items()]

# For the fixture `refused`.
COMMAND = ["decode", *SMALL]


def bench(*arguments):
    return subprocess.run([sys.executable, SCRIPT, "decode", *arguments], capture_output=True, text=True, timeout=240)


def test_the_last_line_is_the_result_and_its_figures_agree():
    done = bench(*SMALL, "--batch-size", "2", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    # The first token comes with the prompt.
    assert result["tokens"] == 2 * 199
    assert result["tokens_per_s"] * result["seconds"] == pytest.approx(2 * 199)
    assert result["call_tokens_per_s"] * result["call_seconds"] == pytest.approx(2 * 200)
    assert 0 < result["first_token_seconds"] < result["call_seconds"]
    # Two rows of two choices reach 8 (1 - (6/8)^2) = 3.5 of eight experts on average.
    weights = 2 * 32 * 16 * 6 + 3 * 32 * 48 + 32 * 8 + 3 * 32 * 16 * (3.5 + 1) + 32 * 64
    assert result["weights_bytes_a_step"] == 4 * weights
    bandwidth = result["weights_bytes_a_step"] * 199 / result["seconds"] / (result["bandwidth_gbs"] * 1e9)
    assert result["bandwidth_share"] == pytest.approx(bandwidth, rel=0.02, abs=1e-4)
    assert result["speedup"] is None


def test_one_new_token_cannot_be_timed(refused):
    assert "--new must be at least 2, got 1" in refused("--new", 1)
