"""`launch/bench.py moe` as a user runs it, at toy sizes: what it reports, not how fast it is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "launch" / "bench.py"
SMALL = ["--hidden", "16", "--width", "8", "--experts", "4", "--experts-per-token", "2", "--tokens", "40", "--repeats", "3"]

COMMAND = ["moe", *SMALL]


def bench(*arguments):
    return subprocess.run([sys.executable, SCRIPT, "moe", *arguments], capture_output=True, text=True, timeout=120)


def test_the_last_line_is_the_result_and_its_figures_agree():
    done = bench(*SMALL, "--skew", "zipf", "--all-backends", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    # R = 40 tokens x 2 rows; 2 R (16 x 16 + 8 x 16) FLOPs forward, twice that backward.
    assert result["flops"] == 3 * 2 * 80 * (16 * 16 + 8 * 16)
    assert set(result["ratios"]) == {"native", "blocks", "ragged_dot", "dense", "pallas", "megablox"}
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
        (["--vision-fraction", "1.5"], "--vision-fraction must be between 0 and 1, got 1.5"),
        (["--vision-fraction", "0.5", "--vision-width", "0"], "--vision-width must be at least 1, got 0"),
        (["--vision-width", "4"], "--vision-width is given without --vision-fraction"),
    ],
)
def test_impossible_sizes_are_refused_by_name(refused, arguments, message):
    assert message in refused(*arguments)


def test_a_spent_time_limit_ends_the_rounds_once_three_are_done():
    done = bench(*SMALL, "--repeats", "50", "--max-seconds", "0", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["rounds"] == 3


def test_a_share_of_vision_tokens_costs_their_width():
    done = bench(*SMALL, "--vision-fraction", "0.25", "--vision-width", "2", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    # 30 text tokens at width 8 and 10 vision tokens at width 2, two rows each; three matrices of hidden x width a row.
    assert result["rows"] == [60, 20]
    assert result["flops"] == 3 * 2 * 3 * 16 * (60 * 8 + 20 * 2)
    assert result["expected_ratio"] == 0.75 + 0.25 * 2 / 8
    assert set(result["seconds"]) == {"one dense matmul", "text experts for all", result["backend"]}
    assert result["ratio_to_dense"] > 0
    assert result["ratio_to_text_only"] > 0


@pytest.mark.parametrize(("fraction", "rows"), [("0", [80, 0]), ("1", [0, 80])])
def test_tokens_of_one_kind_alone(fraction, rows):
    done = bench(*SMALL, "--width", "30", "--vision-fraction", fraction, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["rows"] == rows
    # A third of the text width where none is given.
    assert result["options"]["vision_width"] == 10
    assert result["expected_ratio"] == pytest.approx({"0": 1, "1": 1 / 3}[fraction], abs=1e-4)
