"""`launch/bench.py plan` as a user runs it, at toy sizes: what it reports, not how fast it is."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "launch" / "bench.py"
COMMAND = ["plan"]


@pytest.fixture(scope="module")
def result():
    arguments = ["--candidates=2", "--batch-size=8", "--tokens=16", "--repeats=1", "--json"]
    done = subprocess.run([sys.executable, SCRIPT, *COMMAND, *arguments], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_choice_is_timed_beside_another_mesh(result):
    found = result["candidates"]
    assert next(iter(found)) == result["choice"] and result["fastest"] in found
    meshes = [tuple(f["mesh"].values()) for f in found.values()]
    assert len(set(meshes)) == 2 and all(math.prod(mesh) == 8 for mesh in meshes)
    # The choice is the one that is predicted to be fastest.
    predicted = [f["predicted_seconds"] for f in found.values()]
    assert predicted == sorted(predicted)


def test_ratios_are_to_the_fastest(result):
    found = result["candidates"]
    assert found[result["fastest"]]["ratio"] == 1
    assert result["ratio"] == found[result["choice"]]["ratio"] >= 1
    fastest = found[result["fastest"]]["seconds"]
    assert result["ratio"] == pytest.approx(found[result["choice"]]["seconds"] / fastest, abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--candidates=1"], "--candidates must be at least 2, got 1"),
        (["--tokens=0"], "--tokens must be at least 2, got 0"),
        (["--model=quickstart-vl"], "--model quickstart-vl takes images; this bench trains text models"),
        (["--model=quikstart"], "unknown preset 'quikstart' (did you mean 'quickstart'?)"),
    ],
)
def test_what_cannot_be_compared_is_refused(refused, arguments, message):
    assert message in refused(*arguments)
