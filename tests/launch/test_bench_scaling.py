"""`launch/bench.py scaling` as a user runs it, at toy sizes: what it reports, not how fast it is."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "launch" / "bench.py"
SIZES = {
    "hidden": 16,
    "layers": 2,
    "heads": 2,
    "kv-heads": 1,
    "head-dim": 8,
    "dense-width": 24,
    "experts": 8,
    "experts-per-token": 2,
    "width": 8,
    "vocab": 64,
    "batch-size": 2,
    "tokens": 8,
    "repeats": 3,
    "points": 2,
}
SMALL = [f"--{name}={size}" for name, size in SIZES.items()]

# For the fixture `refused`.
COMMAND = ["scaling", *SMALL]


def bench(*arguments):
    return subprocess.run([sys.executable, SCRIPT, "scaling", *arguments], capture_output=True, text=True, timeout=240)


def test_exponents_are_those_of_the_points_and_the_plot_is_drawn(tmp_path):
    plot = tmp_path / "made" / "scaling.png"
    done = bench(*SMALL, "--axes", "experts", "--plot", plot, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert list(result["axes"]) == list(result["exponents"]) == ["experts"]
    experts = result["axes"]["experts"]
    low, high = experts["points"]
    assert (low["size"], high["size"]) == (8, 128)
    # Two points: the line goes through both.
    assert experts["exponent"] == pytest.approx(math.log(high["seconds"] / low["seconds"]) / math.log(16), abs=1e-3)
    assert result["experts_ratio"] == experts["ratio"] > 0
    # Equal active width: only the gate's products grow, 16 tokens x 6 x 120 rows of 16; the weights themselves grow 16 times.
    assert high["flops"] - low["flops"] == 16 * 6 * 120 * 16
    assert high["parameters"] - low["parameters"] == 120 * (3 * 16 * 8 + 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--axes", "experts,depth"], "--axes experts,depth; expected a comma list"),
        (["--plot", "scaling.txt"], "--plot scaling.txt: its suffix names no image format"),
    ],
)
def test_what_cannot_be_measured_or_drawn_is_refused_before_any_work(refused, arguments, message):
    assert message in refused(*arguments)
