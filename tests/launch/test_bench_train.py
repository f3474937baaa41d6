"""`launch/bench.py train` as a user runs it, at toy sizes: what it reports, not how fast it is."""

import json
import math
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "bench.py"
SIZES = {
    "hidden": 32,
    "layers": 3,
    "heads": 2,
    "kv-heads": 2,
    "head-dim": 16,
    "dense-width": 48,
    "experts": 4,
    "experts-per-token": 2,
    "width": 16,
    "vocab": 64,
    "repeats": 1,
}
SMALL = [f"--{name}={size}" for name, size in SIZES.items()]

MESH = "pipeline=2,expert=2"
# For the fixture `refused`.
COMMAND = ["train", *SMALL]


def bench(*arguments):
    return subprocess.run([sys.executable, SCRIPT, "train", *arguments], capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def result():
    """One run with a mesh whose tokens go to experts and to stages."""
    meshes = ["--mesh", MESH]
    done = bench(*SMALL, "--batch-size", "4", "--tokens", "8", *meshes, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_figures_agree_with_each_other(result):
    assert result["tokens"] == 4 * 8
    assert result["tokens_per_s"] * result["seconds"] == pytest.approx(result["tokens"])
    peak = result["peak_gflops"] * 1e9
    assert result["mfu"] == pytest.approx(result["flops"] / result["seconds"] / peak, rel=0.02, abs=1e-4)
    # A token: attention 32 x 16 x 2 (2 + 2), the dense MLP, the gates, two experts and the shared one, the head; attention scores.
    weights = 3 * 32 * 16 * 8 + 3 * 32 * 48 + 2 * (32 * 4 + 3 * 32 * 16 * 3) + 32 * 64
    assert result["flops"] == 32 * (6 * weights + 12 * 3 * 2 * 16 * 4)
    assert result["bandwidth_gbs"] > 0
    assert result["memory"]["ernie_jax"] is None or result["memory"]["ernie_jax"] < result["memory"]["with_libraries"]["ernie_jax"]


def test_nothing_is_said_of_a_side_that_did_not_run(result):
    assert result["speedup"] is None
    assert result["transformers"] is None
    assert result["memory"]["transformers"] is None


def test_a_mesh_trains_the_same_model_on_its_devices(result):
    mesh = result["meshes"][MESH]
    assert mesh["devices"] == 4
    assert mesh["tokens_per_s"] * mesh["seconds"] == pytest.approx(32)
    assert result["cpu_ratio"] >= mesh["cpu_ratio"] > 0
    assert result["wall_ratio"] >= mesh["wall_ratio"] > 0
    ours, theirs = result["losses"]["ernie_jax"], result["losses"][MESH]
    # Two to warm up, and two in every round: of several sides each runs twice in its turn.
    assert len(ours) == len(theirs) == 2 + 2 * result["rounds"]
    assert ours == pytest.approx(theirs, rel=1e-4)
    # Near the uniform guess at first, then trained on that very batch.
    assert ours[0] == pytest.approx(math.log(64), rel=0.05)
    assert ours[-1] < ours[0]


def test_shares_of_collectives_are_those_of_the_mesh(result):
    shares = result["meshes"][MESH]["collectives"]
    assert 0 < sum(shares.values()) <= 1
    # Tokens go to experts, and from stage to stage.
    assert shares["all-to-all"] > 0 < shares["collective-permute"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "1"], "--tokens must be at least 2, got 1"),
        (["--mesh", "data=2,data=4"], "'data=4'; expected axis=size"),
        (["--mesh", "data=8", "--batch-size", "4"], "--batch-size a multiple of 8"),
        (["--zero", "1"], "give one with --mesh"),
        (["--mesh", "pipeline=2", "--microbatches", "3"], "--batch-size a multiple of 3"),
        (["--mesh", "pipeline=4"], "2 repeating layers cannot be spread over 4 pipeline stages"),
        (["--mesh", "pipeline=2", "--virtual-stages", "2"], "only 'interleaved' has more than 1"),
    ],
)
def test_impossible_sizes_are_refused_by_name(refused, arguments, message):
    assert message in refused(*arguments)


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_a_missing_rival_is_refused_with_the_command_that_installs_it(refused, monkeypatch, package):
    # As if not installed, whatever is.
    monkeypatch.setitem(sys.modules, package, None)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    requirement = next(r for r in extras["compare"] if r.startswith(package))
    message = refused("--against", "transformers")
    assert f"{requirement} is not installed" in message
    assert "pip install -e '.[compare]'" in message
