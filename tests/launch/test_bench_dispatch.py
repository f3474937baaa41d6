"""`launch/bench.py dispatch` as a user runs it, at toy sizes: its figures against hand ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "launch" / "bench.py"
SMALL = ["--tokens", "12", "--hidden", "128", "--experts", "16", "--experts-per-token", "3", "--width", "4"]

# For the fixture `refused`.
COMMAND = ["dispatch", *SMALL]


def bench(*arguments):
    done = subprocess.run([sys.executable, SCRIPT, *COMMAND, *arguments, "--json"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    return result, {(way["dispatch"], way["format"]): way for way in result["ways"]}


def test_bytes_are_those_of_full_buckets():
    """Eight devices in two nodes, 12 tokens each, two experts a device: 8 buckets, or 2 between nodes and 4 of 24 rows within."""
    result, ways = bench("--dispatch", "all_to_all,two_level", "--exchange-dtype", "bfloat16,fp8")
    flat = ways["all_to_all", "fp8"]
    # Rows, a scale, a byte of experts, two weights; bfloat16 has a word of experts.
    assert flat["dispatch_bytes"] == 96 * (128 + 4 + 1 + 2 * 2)
    assert ways["all_to_all", "bfloat16"]["dispatch_bytes"] == 96 * (2 * 128 + 2 + 2 * 2)
    assert flat["to_bfloat16"] == pytest.approx(137 / 262, abs=1e-4) and flat["to_bfloat16"] <= 0.53
    assert flat["combine_bytes"] == 96 * 256
    two = ways["two_level", "fp8"]
    assert two["dispatch_bytes"] == 24 * (128 + 4 + 1 + 3 * 2) + 96 * (128 + 4 + 1 + 2 * 2)
    assert all(way["to_theory"] == 1.0 for way in ways.values())
    # Of each device, four buckets of a flat exchange are in the other node, and one of the two-level one.
    assert flat["between_nodes_bytes"] == 8 * 4 * 12 * (137 + 256)
    assert two["between_nodes_bytes"] == 8 * 12 * (139 + 256)
    assert flat["to_lower_bound"] == pytest.approx(8 * 96 * (137 + 256) / (result["rows_that_must_move"] * (132 + 256)), abs=1e-3)
    # Most tokens have an expert on two or three of seven other devices; in the one other node nearly all.
    assert 96 * 1.5 < result["rows_that_must_move"] < 96 * 3
    assert 96 * 0.6 < result["node_rows_that_must_move"] <= 96
    assert {"hardware", "versions", "commit", "command", "options"} <= set(result)


def test_capacity_makes_buckets_smaller():
    _, ways = bench("--dispatch", "all_to_all", "--exchange-dtype", "compute", "--dtype", "float32", "--capacity-factor", "1")
    # An expert takes 12 x 3 / 16 = 2.25, so 3 rows, and a device has two: buckets of 6, in float32, lists of two pairs.
    (way,) = ways.values()
    assert way["dispatch_bytes"] == 8 * 6 * (4 * 128 + 4 * 2 * 2)
    assert way["combine_bytes"] == 8 * 6 * 4 * 128
    assert way["to_theory"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "3"], "--nodes 3 does not divide --devices 8"),
        (["--experts", "12"], "--devices 8 does not divide --experts 12"),
        (
            ["--exchange-dtype", "fp8,fp4"],
            "--exchange-dtype fp8,fp4; expected a comma list, each once, of compute, bfloat16, fp8, int8",
        ),
        (["--dispatch", "ragged"], "--dispatch ragged; expected a comma list"),
        (["--experts-per-token", "17"], "--experts-per-token 17 is more than --experts 16"),
        (["--capacity-factor", "0"], "--capacity-factor must be positive"),
    ],
)
def test_what_cannot_be_compiled_is_refused_before_any_work(refused, arguments, message):
    assert message in refused(*arguments)
