"""`launch/bench.py pipeline` as a user runs it, at toy sizes: what it reports, not how fast it is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "launch" / "bench.py"
SIZES = {
    "hidden": 32,
    "layers": 5,
    "heads": 2,
    "kv-heads": 2,
    "head-dim": 16,
    "dense-width": 48,
    "experts": 4,
    "width": 16,
    "vocab": 64,
    "repeats": 1,
}
COMMAND = ["pipeline", *(f"--{name}={size}" for name, size in SIZES.items())]


@pytest.fixture(scope="module")
def result():
    arguments = ["--mesh=pipeline=2", "--rows=1", "--tokens=128", "--microbatches=4", "--more-microbatches=16", "--json"]
    done = subprocess.run([sys.executable, SCRIPT, *COMMAND, *arguments], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_run_does_what_the_simulator_says(result):
    found = result["schedules"]
    assert found.keys() == {"gpipe", "1f1b", "interleaved"}
    # Two stages, four microbatches: M + S - 1 ticks forward and as many backward, the turn shared by gpipe's two halves;
    # 1f1b has both in a tick; of two chunks in groups of two microbatches twice the work and one more round.
    assert {name: f["ticks"] for name, f in found.items()} == {"gpipe": 9, "1f1b": 6, "interleaved": 12}
    for name, f in found.items():
        work = 8 if name == "interleaved" else 4
        # The forward of the last virtual stage is part of its backward.
        assert f["active"] == f["simulated_active"] == [[work, work], [work - 4, work]]
        assert f["bubble"] == f["formula"] == pytest.approx(1 / (work + 1), abs=1e-4)


def test_memory_of_1f1b_does_not_grow_with_microbatches(result):
    assert list(result["schedules"]["1f1b"]["temp_bytes"]) == ["4", "16"]
    assert abs(result["growth_1f1b"]) < 0.1
    # Twelve more inputs of 128 x 32 float32 wait at a stage.
    few, many = result["schedules"]["gpipe"]["temp_bytes"].values()
    assert many - few > 12 * 128 * 32 * 4 * 0.9
    assert result["growth_gpipe"] > result["growth_1f1b"]


def test_schedules_train_alike_and_are_timed_side_by_side(result):
    losses = result["losses"]
    # Two to warm up, and of several schedules each runs twice in its turn.
    assert len(losses["gpipe"]) == 4
    for name in ("1f1b", "interleaved"):
        assert losses[name] == pytest.approx(losses["gpipe"], rel=1e-4)
    assert losses["gpipe"][-1] < losses["gpipe"][0]
    assert result["schedules"]["gpipe"]["wall_ratio"] == 1
    assert result["schedules"]["1f1b"]["wall_ratio"] == result["wall_ratio_1f1b"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh=data=2"], "--mesh data=2 has no stages"),
        (["--mesh=pipeline=4"], "4 repeating layers cannot be spread over 4 pipeline stages x 2 virtual stages"),
        (["--mesh=pipeline=2,data=2", "--rows=1"], "splits a microbatch over 2 devices"),
        (["--more-microbatches=8"], "--more-microbatches 8 must be above --microbatches 8"),
    ],
)
def test_impossible_sizes_are_refused_by_name(refused, arguments, message):
    assert message in refused(*arguments)
