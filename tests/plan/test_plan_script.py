"""`launch/plan.py` as a user runs it."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "launch" / "plan.py"


def test_the_plan_of_a_published_model():
    arguments = ["ernie-4.5-21b-a3b", "--topology=h100:64", "--global-tokens=2097152", "--mesh=expert=8", "--json"]
    done = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    # The result is alone on the standard output.
    before, found = done.stderr.splitlines(), json.loads(done.stdout)
    assert before[0] == "Plan      ernie-4.5-21b-a3b on h100:64, bfloat16, adamw"
    for heading in ("the plan", "memory of a device, GiB", "time of a step on a device", "collectives of a step", "why not"):
        assert any(heading in line for line in before), heading
    assert found["fits"] is True and found["mesh"]["expert"] == 8 and found["batch_size"] == 512
    assert 0 < found["memory_gib"] < 0.9 * 80e9 / 2**30 and 0 < found["mfu"] < 1
    # As fast as its MFU says: 64 devices of 989.4 TFLOP/s.
    from ernie_jax.config import preset
    from ernie_jax.train.flops import flops_per_token

    flops = 2097152 * flops_per_token(preset("ernie-4.5-21b-a3b"), 4096, mtp_blocks=1)
    assert found["mfu"] == pytest.approx(flops / (found["step_time_s"] * 64 * 989.4e12))


@pytest.fixture
def main(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # the script sets it
    return runpy.run_path(str(SCRIPT))["main"]


def test_a_plan_that_fits_nowhere_says_what_would(main, capsys):
    assert main(["ernie-4.5-300b-a47b", "--topology=h100:8", "--mesh=expert=8,pipeline=1"]) == 0
    printed = capsys.readouterr().out
    assert "nothing fits: the nearest miss" in printed
    assert "nothing fits; the nearest miss needs" in printed.splitlines()[-1] and "take more devices" in printed.splitlines()[-1]


def test_a_topology_of_ones_own(main, capsys, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "{name: mine, platform: gpu, device: card, devices: 4, devices_per_node: 2, memory_bytes: 80e9, "
        "flops: {float32: 1e14, bfloat16: 2e14}, memory_bandwidth: 1e12, matmul_efficiency: 0.7, "
        "intra: {bandwidth: 1e11, latency: 1e-6}, inter: {bandwidth: 1e10, latency: 1e-5}}"
    )
    assert main(["quickstart", f"--topology={file}", "--seq-len=128", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"] == 4 and found["topology"] == "mine" and found["mesh"]["tensor"] <= 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quikstart", "--topology=h100:8"], "error: unknown preset 'quikstart' (did you mean 'quickstart'?)"),
        (["quickstart", "--topology=h10:8"], "error: topology 'h10:8' is not known (did you mean 'h100'?)"),
        (["quickstart", "--topology=h100:8", "--mesh=data:8"], "error: --mesh data:8: 'data:8'; expected axis=size"),
        (["quickstart", "--topology=h100:8", "--mesh=data=2,data=4"], "expected axis=size with each axis once"),
        (["quickstart", "--topology=h100:8", "--global-tokens=-1"], "error: global_tokens=-1; expected a positive whole number"),
    ],
)
def test_mistakes_are_told_on_the_error_stream(main, capsys, arguments, message):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
