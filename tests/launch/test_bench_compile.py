"""`launch/bench.py compile` as a user runs it, on two shallow models: what it reports, not how fast it is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "launch" / "bench.py"


def bench(*arguments):
    # Less optimisation: the same report in half the time.
    env = os.environ | {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"}
    return subprocess.run([sys.executable, SCRIPT, "compile", *arguments], capture_output=True, text=True, timeout=240, env=env)


def test_the_last_line_is_the_result_and_its_figures_agree():
    done = bench("--layers", "3", "--base-layers", "2", "--tokens", "8", "--repeats", "1", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["ratio"] == result["ratios"][0]
    deep, shallow = result["seconds"]["3 layers"], result["seconds"]["2 layers"]
    assert result["ratio"] == pytest.approx(deep / shallow, rel=0.01)
    for name, seconds in result["seconds"].items():
        assert result["lower_seconds"][name] + result["backend_seconds"][name] <= seconds + 0.01
    spent = result["processor_seconds"]
    assert result["processor_ratio"] == pytest.approx(spent["3 layers"] / spent["2 layers"], rel=0.01)
    assert {"hardware", "versions", "commit", "command", "options"} <= set(result)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "1"], "--layers must be at least 2, got 1"),
        (["--layers", "4"], "both 4"),
        (["--repeats", "0"], "--repeats must be"),
    ],
)
def test_impossible_sizes_are_refused_by_name(arguments, message):
    done = bench(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
