"""`launch/bench.py placement` as a user runs it: balance on a skewed stream before and after experts are moved."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "launch" / "bench.py"

# For the fixture `refused`.
COMMAND = ["placement"]


def test_moving_experts_balances_a_skewed_drifting_stream(tmp_path):
    plot = tmp_path / "made" / "placement.png"
    done = subprocess.run(
        [sys.executable, SCRIPT, "placement", "--windows=3", "--tokens=2048", "--plot", plot, "--json"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["before"]["device"] < 0.8
    assert result["after"]["device"] >= 0.92
    assert result["after"]["node"] >= 0.98 > result["before"]["node"]
    assert result["after"]["device"] <= result["ceiling"] <= 1
    assert result["replicas"] > result["after"]["device"]
    assert result["moved"][0] > 0 and result["commit"] and result["versions"]["jax"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_sizes_that_make_no_sense_are_refused(refused):
    assert "10 experts on 8 devices" in refused("--experts", 10)
    assert "--chosen 65 of --experts 64" in refused("--chosen", 65)
    assert "--windows must be at least 2" in refused("--windows", 1)
