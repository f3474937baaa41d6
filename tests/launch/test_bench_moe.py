"""`launch/bench.py moe` as a user runs it, at toy sizes: what it reports, not how fast it is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "launch" / "bench.py"
SMALL = ["--hidden", "16", "--width", "8", "--experts", "4", "--experts-per-token", "2", "--tokens", "40", "--repeats", "3"]


def bench(*arguments):
    return subprocess.run([sys.executable, SCRIPT, "moe", *arguments], capture_output=True, text=True, timeout=120)


def test_the_last_line_is_the_result_and_its_figures_agree():
    done = bench(*SMALL, "--skew", "zipf", "--all-backends", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    # R = 40 tokens x 2 rows; 2 R (16 x 16 + 8 x 16) FLOPs forward, twice that backward.
    assert result["flops"] == 3 * 2 * 80 * (16 * 16 + 8 * 16)
    assert set(result["ratios"]) == {"blocks", "ragged_dot", "dense", "pallas", "megablox"}
    assert result["ratio_to_dense"] == result["ratios"][result["backend"]] > 0
    assert result["rounds"] == 3
    assert result["options"]["skew"] == "zipf"
    assert result["options"]["tokens"] == 40
    assert {"hardware", "versions", "commit", "command"} <= set(result)
    assert result["command"].endswith("--all-backends --json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--experts", "2", "--experts-per-token", "3"], "--experts-per-token 3 is more than --experts 2"),
        (["--tokens", "0"], "--tokens must be"),
    ],
)
def test_impossible_sizes_are_refused_by_name(arguments, message):
    done = bench(*SMALL, *arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_spent_time_limit_ends_the_rounds_once_three_are_done():
    done = bench(*SMALL, "--repeats", "50", "--max-seconds", "0", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["rounds"] == 3
