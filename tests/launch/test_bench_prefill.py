"""`launch/bench.py prefill` as a user runs it, at toy sizes: what it reports, not how fast it is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "launch" / "bench.py"
SIZES = {
    "hidden": 32,
    "layers": 2,
    "heads": 2,
    "kv-heads": 1,
    "head-dim": 16,
    "dense-width": 48,
    "experts": 4,
    "experts-per-token": 2,
    "width": 16,
    "vocab": 64,
    "repeats": 1,
}
SMALL = [f"--{name}={size}" for name, size in SIZES.items()]

# For the fixture `refused`.
COMMAND = ["prefill", *SMALL]


def bench(*arguments):
    return subprocess.run([sys.executable, SCRIPT, "prefill", *arguments], capture_output=True, text=True, timeout=240)


def test_the_last_line_is_the_result_and_its_figures_agree():
    done = bench(*SMALL, "--batch-size", "3", "--tokens", "8", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["tokens"] == 3 * 8
    assert result["tokens_per_s"] * result["seconds"] == pytest.approx(24)
    # All tokens go through attention and the dense MLP, then to keys and values; the last alone through the rest of the second
    # layer (gate, two experts and the shared one) and the head.
    first, second = 32 * 16 * 6 + 3 * 32 * 48, 32 * 16 * 6 + 32 * 4 + 3 * 32 * 16 * 3
    products = 8 * first + 7 * 32 * 16 * 2 + second + 32 * 64
    assert result["flops"] == 3 * (2 * products + 4 * 2 * 16 * (8 * 4 + 8))
    assert result["speedup"] is None
    assert result["agreement"] is None
    assert result["options"]["batch_size"] == 3
    assert {"peak_gflops", "bandwidth_gbs", "other_cores", "memory", "hardware", "versions", "commit", "command"} <= set(result)


def test_impossible_sizes_are_refused_by_name(refused):
    assert "num_experts_per_tok=5" in refused("--experts-per-token", 5)
    assert "--batch-size must be at least 1, got 0" in refused("--batch-size", 0)
