import argparse
import dataclasses
import json
import math
import runpy
from pathlib import Path

import pytest
from rich.console import Console

from ernie_jax.config import count_parameters
from ernie_jax.config.presets import preset
from ernie_jax.plan.serving import plan_serving
from ernie_jax.plan.serving_memory import (
    Replica,
    cache_bytes_per_token,
    device_cache_per_token,
    expert_bytes,
    serving_memory,
    weight_bytes,
)
from ernie_jax.plan.serving_pool import shapes
from ernie_jax.plan.serving_table import add_serving_arguments, serving_arguments, serving_sentence, serving_table
from ernie_jax.plan.serving_time import pass_time, reached_ranks, touched_experts
from ernie_jax.plan.topologies import topology_named
from ernie_jax.plan.topology import Link, Topology

SMALL, LARGE, VISION = (preset(f"ernie-4.5-{name}") for name in ("21b-a3b", "300b-a47b", "vl-28b-a3b"))
# 1 PFLOP/s, 1 TB/s of which 0.8 is reached, 100 GB/s and 10 GB/s without latency.
ROUND = Topology(
    name="round:16",
    platform="gpu",
    device="round figures",
    devices=16,
    devices_per_node=8,
    memory_bytes=80 * 10**9,
    flops={"float32": 1e15, "bfloat16": 1e15, "fp8": 2e15},
    memory_bandwidth=1e12,
    intra=Link(bandwidth=100e9, latency=0.0),
    inter=Link(bandwidth=10e9, latency=0.0),
    matmul_efficiency=1.0,
    sources={},
)
FAST = dataclasses.replace(ROUND.with_devices(1), memory_bandwidth=4e12)
ASKED = {"prompt_tokens": 2000, "output_tokens": 400, "time_to_first_token_s": 5.0, "time_per_token_s": 0.05}


def test_cache_bytes_of_a_token():
    assert cache_bytes_per_token(SMALL) == 57_344  # 2 x 28 layers x 4 heads x 128 x 2 bytes
    assert cache_bytes_per_token(LARGE) == 221_184  # 2 x 54 x 8 x 128 x 2
    assert cache_bytes_per_token(LARGE, 8) == 110_592
    assert cache_bytes_per_token(LARGE, 4) == 55_296


@pytest.mark.parametrize(("tensor", "share"), [(1, 4), (2, 2), (4, 1), (20, 1)])
def test_cache_is_cut_at_most_as_often_as_there_are_heads(tensor, share):
    assert device_cache_per_token(SMALL, Replica(tensor=tensor)) == 57_344 * share / 4


@pytest.mark.parametrize("model", [SMALL, LARGE, VISION, preset("ernie-4.5-0.3b")])
def test_bfloat16_weights_are_two_bytes_a_parameter(model):
    gates = 0
    if model.moe is not None:
        kinds = 1 if model.moe.vision_intermediate_size is None else 2
        gates = kinds * model.num_moe_layers * model.moe.num_experts * (model.hidden_size + 1)
    # Gates have two bytes more. Norms of a final layer count in both.
    assert weight_bytes(model, Replica()).total == pytest.approx(2 * (count_parameters(model).total + gates), rel=1e-9)


def test_four_bit_experts_by_hand():
    # 51 layers x 64 experts x 3 x 8192 x 3584 weights at 4 bits, and 16 bits of scale for each 128 of them.
    weights = 51 * 64 * 3 * 8192 * 3584
    assert weight_bytes(LARGE, Replica(weight_bits=4)).experts == weights * 4.125 / 8
    # Attention at 8 bits and 16 a column: q and o 8192 x 8192, k and v 8192 x 1024.
    attention = 54 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 2 * (2 * 8192 + 2 * 1024))
    assert weight_bytes(LARGE, Replica(weight_bits=4)).attention == attention
    assert weight_bytes(LARGE, Replica(weight_bits=4, tensor=2, expert=8)).experts == weights * 4.125 / 8 / 16
    # k and v are whole on each of 16 devices beyond their 8 heads' share.
    keys = 54 * 2 * (8192 * 1024 + 2 * 1024)
    assert weight_bytes(LARGE, Replica(weight_bits=4, tensor=16)).attention == pytest.approx((attention - keys) / 16 + keys / 8)


def test_two_bit_experts_begin_at_layer_seven():
    early, late = (expert_bytes(LARGE, Replica(weight_bits=2), layer) for layer in (6, 7))
    weights = 3 * 8192 * 3584
    assert early == weights * 4.125 / 8
    assert late == weights * 2.0625 / 8 + (2 * 3584 + 8192) * 10


def test_published_size_of_the_two_bit_300b():
    # 89 GB (arXiv 2507.07145), of 10^9 or 2^30 bytes; what stays wide is not published.
    assert 89e9 * 0.95 < weight_bytes(LARGE, Replica(weight_bits=2)).total < 89 * 2**30 * 1.05


@pytest.mark.parametrize(
    ("model", "topology", "bits", "devices"),
    [  # Least devices by FastDeploy's documentation.
        (LARGE, "h800:8", 8, 8),
        (LARGE, "h800:8", 4, 4),
        (LARGE, "h800:8", 2, 2),
        (LARGE, "h200:8", 2, 1),  # an H20 has the 141 GB of an H200
        (SMALL, "a100-80:8", 16, 1),
    ],
)
def test_published_least_devices(model, topology, bits, devices):
    machine = topology_named(topology)

    def holds(tensor, expert):
        cut = Replica(tensor=tensor, expert=expert, weight_bits=bits)
        return serving_memory(model, cut, sequences=1, context=4096, tokens=1).bytes <= 0.9 * machine.memory_bytes

    assert min(t * x for t, x in shapes(model, machine) if holds(t, x)) == devices


def test_touched_experts_and_reached_ranks():
    assert touched_experts(64, 8, 1) == pytest.approx(8)
    assert touched_experts(64, 8, 2) == pytest.approx(8 + 8 * 56 / 64)  # 1/8 of the second token's are there
    assert touched_experts(64, 8, 1000) == pytest.approx(64)
    assert reached_ranks(64, 8, 1) == 1
    assert reached_ranks(64, 8, 64) == pytest.approx(8)  # an expert a rank: K ranks
    assert reached_ranks(4, 2, 2) == pytest.approx(2 - 2 / 6)  # both choices on one rank in 2 of 6 cases


def test_decoding_is_bounded_by_memory():
    # One sequence reads what is active: 47.9 B parameters less the input table; gates have 4 bytes. 0.8 TB/s.
    active = count_parameters(LARGE).active - 103424 * 8192
    gates = 51 * 64 * 8193
    time = pass_time(LARGE, ROUND.with_devices(1), Replica(), sequences=1, tokens=1, context=0)
    norms = 8192 * (2 * 54 + 1)
    assert time.seconds == pytest.approx(2 * (active - gates - norms) / 0.8e12, rel=1e-9)
    assert set(time.bounds.values()) == {"memory"} and time.dispatcher == "local"
    # And 1,000 positions of its cache.
    longer = pass_time(LARGE, ROUND.with_devices(1), Replica(), sequences=1, tokens=1, context=1000)
    assert longer.seconds - time.seconds == pytest.approx(221_184_000 / 0.8e12)
    assert longer.parts["cache"] == pytest.approx(221_184_000 / 0.8e12)


def test_prefill_is_bounded_by_compute():
    # 2 FLOPs a weight and token, and 4 H d a position that a token sees; the head for the last token only.
    time = pass_time(SMALL, FAST, Replica(), sequences=4, tokens=2000, context=1000)
    experts = 2 * 8000 * 27 * 3 * 2560 * 1536 * 6
    assert time.parts["experts"] == pytest.approx(experts / 1e15)
    assert time.parts["cache"] == pytest.approx(4 * 8000 * 28 * 20 * 128 * 1000 / 1e15)
    assert time.bounds["experts"] == time.bounds["attention"] == "compute"
    assert time.bounds["head"] == "memory"


def test_eight_bit_products_take_narrow_weights():
    def experts(bits):
        cut = Replica(weight_bits=bits, activations="fp8")
        return pass_time(SMALL, FAST, cut, sequences=4, tokens=2000, context=1000).parts["experts"]

    assert experts(8) == experts(4) == experts(16) / 2


def test_exchange_over_experts_by_hand():
    # 100 tokens of 8192 x 2 bytes reach 5.31 of 8 ranks there and back: 7/8 of their bytes over 100 GB/s, 51 layers.
    reached = 8 * (1 - math.comb(56, 8) / math.comb(64, 8))
    time = pass_time(LARGE, ROUND.with_devices(8), Replica(expert=8), sequences=100, tokens=1, context=0)
    assert time.dispatcher == "all_to_all"
    assert time.parts["expert exchange"] == pytest.approx(51 * 2 * 100 * 8192 * 2 * reached * 7 / 8 / 100e9)
    # With two ranks nearly every token goes to both. Sending all to all is then no slower than sorting them out.
    few = pass_time(LARGE, ROUND.with_devices(2), Replica(expert=2), sequences=100, tokens=1, context=0)
    assert few.parts["expert exchange"] == pytest.approx(51 * 2 * 100 * 8192 * 2 / 100e9, rel=0.01)


def test_exchange_over_tensor_by_hand():
    # Two all-reduces of 100 x 8192 x 2 bytes a layer send 2 x 3/4 of them; float32 logits are gathered.
    time = pass_time(LARGE, ROUND.with_devices(4), Replica(tensor=4), sequences=100, tokens=1, context=0)
    sums = 54 * 2 * 2 * 3 / 4 * 100 * 8192 * 2 / 100e9
    assert time.parts["tensor exchange"] == pytest.approx(sums + 3 / 4 * 100 * 103424 * 4 / 100e9)


def test_choice_is_the_best_batch_and_meets_its_targets():
    plan = plan_serving("ernie-4.5-300b-a47b", "h800:64", weight_bits=(4,), kv_bits=(8,), **ASKED)
    assert plan.fits and plan.devices <= 64
    assert plan.prefill.latency_s <= 5.0 and plan.decode.latency_s <= 0.05
    for pool in (plan.prefill, plan.decode):
        assert pool.memory.bytes <= 0.9 * 80e9
        assert pool.tokens_per_s_per_device == max(
            p.tokens_per_s_per_device for p in plan.considered if p.fits and p.role == pool.role
        )
        # One sequence more a rank breaks the target or the memory.
        cut, n = pool.replica, pool.sequences + 1
        reading = pool.role == "prefill"
        tokens, mean, longest = (2000, 1000, 2000) if reading else (1, 2200, 2400)
        machine = topology_named("h800:64").with_devices(cut.devices)
        more = pass_time(LARGE, machine, cut, sequences=n, tokens=tokens, context=mean).seconds
        held = serving_memory(LARGE, cut, sequences=n, context=longest, tokens=n * tokens).bytes
        assert held > 0.9 * 80e9 or (2 * more > 5.0 if reading else more > 0.05)
    # No other split of the devices serves more requests.
    reading, writing = plan.prefill.tokens_per_s / 2000, plan.decode.tokens_per_s / 400
    splits = [
        min(p * reading, (64 - p * plan.prefill.replica.devices) // plan.decode.replica.devices * writing) for p in range(1, 17)
    ]
    assert plan.requests_per_s == pytest.approx(max(splits))


def test_published_throughput_of_a_node():
    """56,000 tokens/s in and 21,000 out of eight H800: below the roofline, and above half of it."""
    plan = plan_serving(
        "ernie-4.5-300b-a47b", "h800:64", weight_bits=(4,), kv_bits=(8,), activations="fp8", **ASKED
    )  # fmt: skip
    assert 56_000 < 8 * plan.prefill.tokens_per_s_per_device < 2 * 56_000
    assert 21_000 < 8 * plan.decode.tokens_per_s_per_device < 2 * 21_000


def test_requests_asked_for_are_served_on_the_fewest_devices():
    plan = plan_serving("ernie-4.5-21b-a3b", "h100:64", weight_bits=(16,), kv_bits=(16,), requests_per_s=40.0, **ASKED)
    assert plan.fits and plan.requests_per_s >= 40
    assert plan.prefill_replicas == math.ceil(40 * 2000 / plan.prefill.tokens_per_s)
    assert plan.decode_replicas == math.ceil(40 * 400 / plan.decode.tokens_per_s)
    fewer = [
        a.replica.devices * math.ceil(80_000 / a.tokens_per_s) + b.replica.devices * math.ceil(16_000 / b.tokens_per_s)
        for a in plan.considered
        for b in plan.considered
        if a.role == "prefill" and b.role == "decode" and a.fits and b.fits
    ]
    assert plan.devices == min(fewer)


def test_more_requests_than_the_topology_serves():
    plan = plan_serving("ernie-4.5-21b-a3b", "h100:8", requests_per_s=1000.0, **ASKED)
    assert not plan.fits and "h100:8 has 8" in plan.reason and "1000 requests/s needs" in plan.reason


def test_ratio_keeps_both_pools_busy():
    plan = plan_serving("ernie-4.5-21b-a3b", "h100:64", **ASKED)
    seconds = 2000 / plan.prefill.tokens_per_s_per_device, 400 / plan.decode.tokens_per_s_per_device
    assert plan.decode_devices_per_prefill_device == pytest.approx(seconds[1] / seconds[0])


def test_targets_that_nothing_meets():
    plan = plan_serving("ernie-4.5-300b-a47b", "h800:8", **ASKED | {"time_per_token_s": 1e-4})
    assert not plan.fits and plan.decode is None and plan.requests_per_s == 0
    assert "no decode pool fits h800:8" in plan.reason and "the target is 0.1 ms" in plan.reason
    assert "nothing fits" in serving_sentence(plan) and plan.to_json()["decode"] is None


def test_model_that_does_not_fit_says_what_it_needs():
    plan = plan_serving("ernie-4.5-300b-a47b", "a100-80:4", weight_bits=(16,), **ASKED)
    assert not plan.fits and "weights; 67.1 may be filled" in plan.reason


def test_pools_share_the_width_of_the_cache():
    plan = plan_serving("ernie-4.5-300b-a47b", "h800:16", **ASKED)
    assert plan.prefill.replica.kv_bits == plan.decode.replica.kv_bits


def test_every_pool_not_chosen_says_why():
    plan = plan_serving("ernie-4.5-21b-a3b", "h100:16", **ASKED)
    chosen = {plan.prefill.replica, plan.decode.replica}
    assert all(pool.reason for pool in plan.considered if pool.replica not in chosen)
    widths = {pool.replica.weight_bits for pool in plan.alternatives("decode", most=20)}
    assert widths | {plan.decode.replica.weight_bits} == {16, 8, 4, 2}


def test_shapes_divide_the_model():
    assert list(shapes(preset("ernie-4.5-0.3b"), topology_named("h100:8"))) == [(1, 1), (2, 1), (4, 1), (8, 1)]
    found = list(shapes(SMALL, topology_named("h100:16")))
    assert {tensor for tensor, _ in found} == {1, 2, 4}  # 20 heads
    assert max(expert for _, expert in found) == 16


def test_json_is_plain_and_whole():
    plan = plan_serving("ernie-4.5-21b-a3b", "h100:16", **ASKED)
    said = json.loads(json.dumps(plan.to_json()))
    assert said["fits"] and said["devices"] == plan.devices
    assert said["prefill"]["replicas"] == plan.prefill_replicas
    assert sum(said["decode"]["memory"].values()) == pytest.approx(said["decode"]["memory_gib"])
    assert said["output_tokens_per_s"] == pytest.approx(400 * said["requests_per_s"])
    assert {pool["role"] for pool in said["alternatives"]["decode"]} == {"decode"}


def test_table_shows_the_pools_and_what_lost():
    plan = plan_serving("ernie-4.5-21b-a3b", "h100:16", **ASKED)
    console = Console(width=160, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(serving_sentence(plan), serving_table(plan), markup=False)
    text = capture.get()
    assert f"{plan.decode_replicas} x {plan.decode.replica.devices}" in text
    assert "other decode pools" in text and plan.alternatives("decode")[0].reason in text
    assert "GiB a device, of 67.1" in text


def test_flags_are_the_arguments():
    parser = argparse.ArgumentParser()
    add_serving_arguments(parser)
    given = serving_arguments(
        parser.parse_args(["--serve", "--weight-bits", "4", "8", "--requests-per-s", "3", "--time-per-token", "0.02"])
    )
    assert given["weight_bits"] == (4, 8) and given["requests_per_s"] == 3 and given["time_per_token_s"] == 0.02
    assert plan_serving("ernie-4.5-0.3b", "h100:8", **given).fits


COMMAND = Path(__file__).parents[2] / "launch" / "plan.py"


def test_command_prints_the_plan(monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    main = runpy.run_path(str(COMMAND))["main"]
    flags = ["ernie-4.5-0.3b", "--topology", "h100:8", "--serve", "--weight-bits", "16", "--kv-bits", "16"]
    assert main([*flags, "--json"]) == 0
    printed = capsys.readouterr()
    asked = {"prompt_tokens": 2048, "output_tokens": 512, "time_to_first_token_s": 2.0, "time_per_token_s": 0.05}
    plan = plan_serving("ernie-4.5-0.3b", "h100:8", weight_bits=(16,), kv_bits=(16,), **asked)
    assert json.loads(printed.out) == json.loads(json.dumps(plan.to_json()))
    assert "tokens/s a device" in printed.err
    assert main(flags) == 0 and capsys.readouterr().out.splitlines()[-1] == serving_sentence(plan)
    assert main([*flags, "--time-per-token", "0"]) == 2 and "time_per_token_s=0" in capsys.readouterr().err
    assert main([*flags, "--html", "x.html"]) == 2 and "are of training plans" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"time_per_token_s": 0.0}, r"time_per_token_s=0.0; expected a number above 0"),
        ({"time_to_first_token_s": -1}, r"time_to_first_token_s=-1"),
        ({"time_to_first_token_s": math.nan}, r"time_to_first_token_s=nan"),
        ({"prompt_tokens": 0}, r"prompt_tokens=0; expected a whole number of at least 1"),
        ({"output_tokens": 2.5}, r"output_tokens=2.5"),
        ({"prompt_tokens": 131_000, "output_tokens": 1000}, r"132000 positions together.*max_position_embeddings=131072"),
        ({"weight_bits": (3,)}, r"weight_bits has 3 \(did you mean 4\?\); there are 16, 8, 4, 2"),
        ({"weight_bits": ()}, r"weight_bits=\(\); expected one or more"),
        ({"kv_bits": (2,)}, r"kv_bits has 2 \(did you mean 4\?\)"),
        ({"activations": "fp4"}, r"activations='fp4' \(did you mean 'fp8'\?\)"),
        ({"requests_per_s": 0}, r"requests_per_s=0; expected a number above 0"),
        ({"model": "ernie-4.5-300b-a48b"}, r"did you mean 'ernie-4.5-300b-a47b'"),
        ({"topology": "h801:8"}, r"topology 'h801:8' is not known \(did you mean 'h800'\?\)"),
    ],
)
def test_bad_inputs_are_refused(changed, words):
    given = {"model": "ernie-4.5-300b-a47b", "topology": "h800:8", **ASKED, **changed}
    with pytest.raises(ValueError, match=words):
        plan_serving(given.pop("model"), given.pop("topology"), **given)


def test_a_shape_of_ones_own_and_a_machine_without_fp8():
    machine = dataclasses.replace(ROUND, flops={"float32": 1e15, "bfloat16": 1e15})
    assert plan_serving(preset("quickstart"), machine, **ASKED | {"prompt_tokens": 100}).model == "custom"
    with pytest.raises(ValueError, match="no peak for dtype 'fp8'"):
        plan_serving(preset("quickstart"), machine, activations="fp8", **ASKED | {"prompt_tokens": 100})
