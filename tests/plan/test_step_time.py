import dataclasses

import pytest

from ernie_jax.config import count_parameters, preset
from ernie_jax.config.data import DataConfig
from ernie_jax.config.run import MeshConfig, MoETrainConfig, PipelineConfig, RunConfig
from ernie_jax.plan import stage_time
from ernie_jax.plan.abstract_layout import abstract_layout
from ernie_jax.plan.hlo import CollectiveUse
from ernie_jax.plan.operations import EXPERT_SKEW, Operation, ShardSizes, StepWork, roofline, weight_groups
from ernie_jax.plan.overlap import communication, purpose_of
from ernie_jax.plan.stage_time import StageCosts, formula_seconds, layers_of_stages, pipeline_seconds
from ernie_jax.plan.step_time import predict_time
from ernie_jax.plan.topology import Link, Topology
from ernie_jax.testing import tiny_dense, tiny_moe
from ernie_jax.train.flops import flops_per_token
from ernie_jax.train.remat_prediction import StepShape, extra_flops

# 1 TFLOP/s in every format, no time for memory; nodes of 4, 100 GB/s and 1 us within, 10 GB/s and 10 us between.
ARITHMETIC = Topology(
    name="arithmetic:1",
    platform="gpu",
    device="round figures",
    devices=1,
    devices_per_node=4,
    memory_bytes=10**12,
    flops={"float32": 1e12, "bfloat16": 1e12, "fp8": 1e12},
    memory_bandwidth=1e30,
    intra=Link(bandwidth=100e9, latency=1e-6),
    inter=Link(bandwidth=10e9, latency=1e-5),
    matmul_efficiency=0.5,
    sources={},
)


def a_run(model, *, batch_size=8, seq_len=64, **settings):
    settings = {"moe": MoETrainConfig(balance_scope="microbatch"), "attention": "dense"} | settings
    return RunConfig(
        model=model, steps=1, batch_size=batch_size, seq_len=seq_len, data=DataConfig(kind="standard_library"), **settings
    )


def use(kind, axis, size, count, scope="", devices=2):
    return CollectiveUse(kind, axis, size, count, scope, "bf16", devices)


def parts_of(time):
    return {(part.name, part.kind): part.seconds for part in time.parts}


def test_an_operation_takes_the_longer_of_arithmetic_and_traffic():
    topology = dataclasses.replace(ARITHMETIC, memory_bandwidth=1e12)
    # 1 TFLOP at half of 1 TFLOP/s is 2 s; 3 TB at 1 TB/s is 3 s.
    assert roofline(topology, 1e12, 1e12, "bfloat16") == 2
    assert roofline(topology, 1e12, 3e12, "bfloat16") == 3
    # Backward: twice the FLOPs and bytes, and 4 bytes for the gradient of each weight.
    assert Operation("x", 10, 20, "float32", weights=3).backward == Operation("x", 20, 52, "float32")


@pytest.mark.parametrize("model", [tiny_dense(), tiny_moe()], ids=["dense", "moe"])
def test_arithmetic_of_one_device_is_that_of_the_model(model):
    run = a_run(model)
    time = predict_time(run, ARITHMETIC, [])
    tokens, length = 8 * 64, 64
    # The dense kernel computes all T scores of a token, the model's FLOPs are of the T / 2 that it sees.
    unseen = 12 * model.num_hidden_layers * model.num_attention_heads * model.head_dim * length / 2
    assert time.seconds == pytest.approx(tokens * (flops_per_token(model, length) + unseen) / 0.5e12)
    assert time.mfu == pytest.approx(0.5 * flops_per_token(model, length) / (flops_per_token(model, length) + unseen))
    assert time.tokens_per_s == pytest.approx(tokens / time.seconds)
    assert time.exposed == time.hidden == time.bubble == 0


@pytest.mark.parametrize("policy", ["full", "attention", "experts"])
def test_what_is_recomputed_takes_its_flops(policy):
    run = a_run(tiny_moe())
    shape = StepShape.of(run, abstract_layout(run), "gpu")
    more = predict_time(dataclasses.replace(run, remat=policy), ARITHMETIC, [])
    assert more.seconds - predict_time(run, ARITHMETIC, []).seconds == pytest.approx(extra_flops(run, shape, policy) / 0.5e12)
    assert parts_of(more)["recomputation", "compute"] > 0


def test_work_is_spread_over_the_devices_and_the_fullest_one_counts():
    model = tiny_moe()
    run = a_run(model, mesh=MeshConfig(data=2, expert=2))
    one = predict_time(a_run(model), ARITHMETIC, [])
    four = predict_time(run, ARITHMETIC.with_devices(4), [])
    experts = "experts", "compute"
    assert parts_of(four)[experts] == pytest.approx(parts_of(one)[experts] * EXPERT_SKEW / 4)
    assert four.seconds - parts_of(four)[experts] == pytest.approx((one.seconds - parts_of(one)[experts]) / 4)
    even = predict_time(run, ARITHMETIC.with_devices(4), [], skew=1.0)
    assert even.seconds == pytest.approx(one.seconds / 4)


def test_collectives_are_exposed_or_hidden():
    run = a_run(tiny_dense(), mesh=MeshConfig(data=4, tensor=4))
    topology = ARITHMETIC.with_devices(16)
    # Over tensor, in a node: 3/4 of 8 MB at 100 GB/s is 60 us and 3 steps of 1 us.
    # Over data, between nodes: 3/4 of 8 MB at 10 GB/s is 600 us and 3 steps of 10 us; in a loop 80% of it can be hidden.
    uses = [
        use("all-gather", "tensor", 10 * 8e6, 10, "attention", 4),
        use("reduce-scatter", "data", 10 * 8e6, 10, "transpose/weights", 4),
        use("all-gather", "data", 8e6, 1, "update", 4),
    ]
    network = {(each.axis, each.purpose): each for each in communication(run, topology, uses)}
    assert network["tensor", "activations"].in_loop == pytest.approx(630e-6)
    weights = network["data", "weights"]
    assert (weights.in_loop, weights.once, weights.hideable) == (pytest.approx(6300e-6), pytest.approx(630e-6), 0.8)
    # Slow devices: there is enough to hide behind.
    slow = dataclasses.replace(topology, flops=dict.fromkeys(topology.flops, 1e9))
    found = parts_of(predict_time(run, slow, uses))
    assert found["activations over tensor", "exposed"] == pytest.approx(630e-6)
    assert found["weights over data", "hidden"] == pytest.approx(0.8 * 6300e-6)
    assert found["weights over data", "exposed"] == pytest.approx(0.2 * 6300e-6 + 630e-6)
    # Nothing to hide behind.
    fast = dataclasses.replace(topology, flops=dict.fromkeys(topology.flops, 1e30))
    assert predict_time(run, fast, uses).exposed == pytest.approx(630e-6 + 6300e-6 + 630e-6)


@pytest.mark.parametrize(
    ("kind", "axis", "scope", "purpose"),
    [
        ("all-to-all", "expert", "moe/moe_exchange/there", "experts"),
        ("all-gather", "expert", "moe/moe_exchange/there", "experts"),
        ("all-to-all", "expert/inner", "", "experts"),
        ("all-to-all", "pipeline", "stage_weights", "weights"),
        ("collective-permute", "pipeline", "pipeline_send", "stages"),
        ("all-gather", "tensor", "attention", "activations"),
        ("all-reduce", "data+expert", "transpose/weights", "weights"),
    ],
)
def test_purposes(kind, axis, scope, purpose):
    assert purpose_of(use(kind, axis, 1, 1, scope)) == purpose


def test_a_ragged_exchange_sends_the_rows_that_are_there():
    model = tiny_moe()
    moe = dataclasses.replace(model.moe, num_experts=8, num_experts_per_tok=1)
    run = a_run(dataclasses.replace(model, moe=moe), mesh=MeshConfig(data=2, expert=2))
    topology = ARITHMETIC.with_devices(4)
    whole, ragged = (
        communication(run, topology, [use(kind, "expert", 8e6, 1)])[0].once for kind in ("all-to-all", "ragged-all-to-all")
    )
    # One message of 1 us either way. Of two shards a token's one expert is on one: half of the rows, times the skew.
    assert ragged - 1e-6 == pytest.approx((whole - 1e-6) * 0.5 * EXPERT_SKEW)


def test_fake_devices_neither_hide_nor_wait():
    model = dataclasses.replace(tiny_dense(), num_hidden_layers=4)
    run = a_run(model, mesh=MeshConfig(pipeline=4), pipeline=PipelineConfig(microbatches=4))
    cpu = dataclasses.replace(ARITHMETIC.with_devices(4), platform="cpu")
    assert predict_time(run, cpu, []).bubble == 0
    assert predict_time(run, ARITHMETIC.with_devices(4), []).bubble > 0


@pytest.mark.parametrize(("virtual", "seconds"), [(1, 8 * 4 + 3 * 4), (2, 8 * 4 + 3 * 4 / 2)])
def test_equal_stages_wait_as_the_schedule_says(virtual, seconds):
    assert formula_seconds([4.0] * 4, 8, virtual) == seconds


@pytest.mark.parametrize(("schedule", "virtual"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
@pytest.mark.parametrize("count", [4, 8, 32])
def test_the_formula_is_near_the_simulation(monkeypatch, schedule, virtual, count):
    model = dataclasses.replace(tiny_dense(), num_hidden_layers=8)
    pipeline = PipelineConfig(schedule=schedule, microbatches=count, virtual_stages=virtual)
    run = a_run(model, batch_size=count, mesh=MeshConfig(pipeline=4), pipeline=pipeline)
    chunks = 4 * virtual
    # The last one begins its backward with its forward; it has a head of a chunk's forward besides.
    costs = StageCosts(4, (*[1.0] * (chunks - 1), 0.0), (*[3.0] * (chunks - 1), 4.0))
    simulated = pipeline_seconds(run, costs)
    monkeypatch.setattr(stage_time, "MOST_SIMULATED", 0)
    assert pipeline_seconds(run, costs) == pytest.approx(simulated, rel=0.03)


def test_layers_of_a_published_model_in_stages():
    run = a_run(preset("ernie-4.5-300b-a47b"), mesh=MeshConfig(pipeline=8))
    chunks, before, behind = layers_of_stages(run)
    # 51 MoE layers over 8 stages: 6 each and 3 over, the dense prefix of 3 in the first.
    assert sum(chunk["moe"] for chunk in chunks) == 51 and {chunk["moe"] for chunk in chunks} == {6, 7}
    assert (before, behind) == ({"dense": 3}, {})


@pytest.mark.parametrize("name", ["ernie-4.5-0.3b", "ernie-4.5-21b-a3b", "ernie-4.5-300b-a47b", "ernie-4.5-vl-424b-a47b"])
def test_weights_on_a_device(name):
    model = preset(name)
    count = count_parameters(model)
    groups = weight_groups(a_run(model))
    assert sum(groups.values()) == pytest.approx(count.total + count.mtp, rel=2e-4)
    alone = ShardSizes.of(a_run(model))
    assert alone.kept == alone.moments == sum(groups.values())
    if name == "ernie-4.5-300b-a47b":
        # Experts over 8 and stages, the rest over stages; moments over 8 x 4 data shards more, of experts over 4.
        sizes = ShardSizes.of(a_run(model, batch_size=64, mesh=MeshConfig(data=4, expert=8, pipeline=2, zero=1)))
        assert sizes.kept == pytest.approx(groups["dense"] / 2 + groups["experts"] / 16)
        assert sizes.moments == pytest.approx(groups["dense"] / 64 + groups["experts"] / 64)


def test_spare_rows_cost_traffic_and_no_arithmetic():
    model = tiny_moe()
    spread = a_run(model, mesh=MeshConfig(expert=4))
    shape = StepShape.of(spread, abstract_layout(spread), "gpu")
    work = StepWork(spread, shape, "gpu", skew=1.0)
    experts = [op for op in work.layer("moe") if op.part == "experts"]
    moe, rows = model.moe, shape.tokens * model.moe.num_experts_per_tok
    assert sum(op.flops for op in experts) == pytest.approx(rows * 6 * model.hidden_size * moe.intermediate_size)
    fewer = dataclasses.replace(work, shape=dataclasses.replace(shape, rows=rows, sent=0))
    assert shape.rows > rows
    assert sum(op.bytes for op in experts) > sum(op.bytes for op in fewer.layer("moe") if op.part == "experts")


def test_a_mesh_of_another_size_is_refused():
    with pytest.raises(ValueError, match="needs 4 devices, but arithmetic:8 has 8"):
        predict_time(a_run(tiny_dense(), mesh=MeshConfig(data=4)), ARITHMETIC.with_devices(8), [use("all-reduce", "data", 4, 1)])
