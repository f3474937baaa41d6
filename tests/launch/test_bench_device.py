"""`launch/bench.py device` as a user runs it, at toy sizes on a CPU: what it reports, not how fast it is."""

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"


def bench(*arguments):
    command = [sys.executable, LAUNCH / "bench.py", "device", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


@pytest.fixture
def presets(monkeypatch):
    monkeypatch.syspath_prepend(LAUNCH)
    return importlib.import_module("benches.device_presets")


def test_the_tiny_preset_runs_every_phase_and_its_figures_agree():
    done = bench("--preset", "tiny", "--seconds", "0.2", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert {"hardware", "versions", "commit", "command", "options", "memory"} <= set(result)
    assert (result["bench"], result["preset"], result["device"]) == ("device", "tiny", "cpu")
    assert result["kernels"] == {"attention": "dense", "grouped_matmul": "blocks"}
    machine = result["machine"]
    assert machine["peak_tflops"] > 0 and machine["bandwidth_gbs"] > 0
    phases = {"train": result["train"], "prefill": result["prefill"], **result["decode"]}
    assert set(phases) == {"train", "prefill", "2"}
    for name, phase in phases.items():
        assert phase["rounds"] >= 3, name
        assert 0 < phase["mfu"] < 1, name
        rate = phase["flops"] / phase["seconds"] / 1e12
        assert phase["mfu"] == pytest.approx(rate / machine["peak_tflops"], abs=1e-4), name
        # No data sheet knows this CPU.
        assert phase["mfu_data_sheet"] is None and machine["data_sheet_tflops"] is None
    # 2 x 64 tokens in the first two; 2 rows of 63 tokens after the first in decoding.
    for name, tokens in (("train", 128), ("prefill", 128), ("2", 126)):
        assert phases[name]["tokens_per_s"] == pytest.approx(tokens / phases[name]["seconds"])
    # A fresh model over 512 tokens knows nothing, and its first update helps.
    first, second = result["train"]["losses"]
    assert second < first == pytest.approx(math.log(512), abs=0.3)
    decode = result["decode"]["2"]
    assert 0 < decode["bandwidth_share"] < 1
    moved = decode["bytes"] / decode["seconds"] / 1e9 / machine["bandwidth_gbs"]
    assert decode["bandwidth_share"] == pytest.approx(moved, abs=1e-4)
    products = result["grouped_matmul"]
    assert set(products) == {"one dense matmul", "blocks", "pallas"}
    # 128 tokens x 2 rows; gate, up and down of 64 x 32; forward once, backward twice.
    flops = 3 * 2 * 256 * 3 * 64 * 32
    for product in products.values():
        assert product["tflops"] == pytest.approx(flops / product["seconds"] / 1e12)
        assert product["rounds"] >= 3
    assert products["one dense matmul"]["ratio_to_dense"] == 1 < products["pallas"]["ratio_to_dense"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--preset full is for a GPU or TPU and this is a CPU; give --preset tiny"),
        (["--preset", "tiny", "--seconds", "0"], "--seconds must be more than 0, got 0.0"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_any_work(arguments, message):
    done = bench(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert not done.stdout


def test_a_device_with_too_little_memory_is_refused(presets):
    model = importlib.import_module("benches.model")
    full = presets.PRESETS["full"]
    config = model.model_config({**full.sizes, "dtype": full.dtype, "seed": 0}, tokens=full.tokens)

    # No accelerator is at hand: a stand-in that tells a memory size.
    def card(gigabytes):
        return SimpleNamespace(platform="gpu", device_kind="card", memory_stats=lambda: {"bytes_limit": int(gigabytes * 1e9)})

    with pytest.raises(ValueError, match=r"full needs about 67.* GB and card gives JAX 60 GB; .*MEM_FRACTION"):
        presets.check_device("full", config, card(60))
    found = presets.check_device("full", config, card(113))
    assert found["needed"] < found["limit"] == 113e9
    assert presets.check_device("full", config, SimpleNamespace(platform="tpu", memory_stats=lambda: None))["limit"] is None


def test_the_full_preset_has_one_to_three_billion_parameters_of_the_published_widths(presets):
    from ernie_jax import preset
    from ernie_jax.config.parameters import count_parameters

    model = importlib.import_module("benches.model")
    full = presets.PRESETS["full"]
    config = model.model_config({**full.sizes, "dtype": full.dtype, "seed": 0}, tokens=full.tokens)
    assert 1e9 < count_parameters(config).total < 3e9
    published = preset("ernie-4.5-21b-a3b")
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
        assert getattr(config, name) == getattr(published, name), name
    for name in ("num_experts", "num_experts_per_tok", "intermediate_size"):
        assert getattr(config.moe, name) == getattr(published.moe, name), name
    assert full.tokens == 4096
