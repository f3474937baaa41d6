import dataclasses
import importlib
import inspect
import math
import subprocess
import sys

import pytest

import ernie_jax as ej
from ernie_jax.config import preset
from ernie_jax.plan.abstract_layout import abstract_layout
from ernie_jax.plan.candidates import Task, meshes, ways
from ernie_jax.plan.memory import predict_memory
from ernie_jax.plan.plan import Plan, make_plan
from ernie_jax.plan.search import look
from ernie_jax.plan.topologies import topology_named
from ernie_jax.testing import tiny_moe
from ernie_jax.train.gradients import check_batch_size

KEYS = {
    *("mesh", "schedule", "remat", "fits", "memory_gib", "memory"),
    *("step_time_s", "tokens_per_s", "mfu", "collectives", "alternatives"),
}
NODE = topology_named("h100:8")


@pytest.fixture(scope="module")
def quickstart():
    return make_plan("quickstart", NODE, global_tokens=64 * 512, seq_len=512)


def a_task(name="quickstart", rows=64, length=512, **settings):
    return Task(model=preset(name), batch_size=rows, seq_len=length, **settings)


def test_meshes_fill_the_devices_and_divide_the_model():
    # 8 heads, 2 kv heads, width 256, 16 experts, 3 repeating layers: stages of 1 or 2 (3 divides neither width nor devices).
    found = list(meshes(a_task(), NODE))
    assert all(math.prod(mesh.values()) == 8 for mesh in found)
    # Pairs (pipeline, rest of 8 as data x expert x tensor): 10 ways to make 8 of three, 6 to make 4.
    assert len(found) == 10 + 6
    assert {mesh["pipeline"] for mesh in found} == {1, 2}
    # Rows must split over data x expert: 2 rows only over 1 or 2.
    few = list(meshes(a_task(rows=2), NODE))
    assert few and all(mesh["data"] * mesh["expert"] <= 2 for mesh in few)


def test_a_tensor_axis_stays_within_a_node_and_divides_the_heads():
    found = list(meshes(a_task("ernie-4.5-300b-a47b", rows=512, length=4096), topology_named("h100:512")))
    assert {mesh["tensor"] for mesh in found} == {1, 2, 4, 8}
    # Of 51 MoE layers at most 32 stages divide the width of 8,192; 64 experts.
    assert {mesh["pipeline"] for mesh in found} == {1, 2, 4, 8, 16, 32}
    assert {mesh["expert"] for mesh in found} == {1, 2, 4, 8, 16, 32, 64}
    # 20 heads and 4 kv heads of 21B: 8 divides neither.
    small = list(meshes(a_task("ernie-4.5-21b-a3b", rows=64, length=4096), topology_named("h100:64")))
    assert {mesh["tensor"] for mesh in small} == {1, 2, 4}


def test_every_way_is_one_that_a_real_run_accepts():
    task = a_task()
    found = list(ways(task, NODE))
    for way in found:
        run = way.run(task, "full")
        check_batch_size(run.batch_size, run.parts, abstract_layout(run))
        assert run.parts == way.microbatches
    assert {way.schedule for way in found if way.pipeline == 2} == {"gpipe", "1f1b"}  # 3 layers make no 4 chunks
    assert {way.zero for way in found if way.data * way.expert == 1} == {0}
    assert {way.dispatch for way in found if way.expert == 1} == {"auto"}


def test_images_are_a_share_of_the_tokens():
    task = Task(model=preset("quickstart-vl"), batch_size=16, seq_len=64, image_share=0.5)
    way = next(
        w for w in ways(task, NODE) if w.mesh == {"pipeline": 1, "data": 4, "expert": 2, "tensor": 1} and w.microbatches == 2
    )
    # A microbatch of a device has one row of 64 tokens, half of them of images: 32 merged squares of 4 patches.
    assert way.run(task, "full").data.max_patches == 32 * 4


def test_what_is_given_is_kept():
    plan = make_plan(
        "quickstart", NODE, global_tokens=64 * 512, seq_len=512, mesh={"expert": 4}, zero=1, remat="full", microbatches=2
    )
    for candidate in plan.considered:
        run = candidate.run
        assert (run.mesh.expert, run.mesh.zero, run.remat, run.parts) == (4, 1, "full", 2)
    staged = make_plan("quickstart", NODE, global_tokens=64 * 512, seq_len=512, mesh={"pipeline": 2}, schedule="gpipe")
    assert {candidate.schedule for candidate in staged.considered} == {"gpipe"}


def test_the_choice_is_the_fastest_of_all_ways():
    given = {"mesh": {"tensor": 1, "pipeline": 1}, "zero": 1}
    plan = make_plan("quickstart", NODE, global_tokens=64 * 512, seq_len=512, **given)
    task = a_task(**given)
    every = [look(task, NODE, plan.budget, way) for way in ways(task, NODE)]
    best = min(c.time.seconds for c in every if c is not None and c.fits)
    assert plan.choice.time.seconds == pytest.approx(best)


def test_the_policy_is_the_cheapest_that_fits(quickstart):
    run = quickstart.choice.run
    needed = {policy: predict_memory(dataclasses.replace(run, remat=policy), "gpu").bytes for policy in ("none", "full")}
    assert quickstart.choice.remat == "none" and needed["none"] > needed["full"]
    # Room for full recomputation alone, on this mesh.
    fixed = {"mesh": quickstart.choice.mesh, "zero": run.mesh.zero, "microbatches": run.parts, "dispatch": run.moe.dispatch}
    share = (needed["full"] + 1) / NODE.memory_bytes
    tight = make_plan("quickstart", NODE, global_tokens=64 * 512, seq_len=512, memory_budget=share, **fixed)
    assert tight.choice.memory.bytes <= needed["full"] and tight.choice.remat != "none"
    assert tight.choice.time.seconds >= quickstart.choice.time.seconds


def test_runners_up_are_other_meshes_with_reasons(quickstart):
    choice, others = quickstart.choice, quickstart.alternatives
    assert choice.fits and choice.reason == ""
    assert len({tuple(c.mesh.values()) for c in (choice, *others)}) == len(others) + 1
    times = [c.time.seconds for c in (choice, *others)]
    assert times == sorted(times) and all("slower: " in c.reason for c in others)
    # The percentage is that of the times.
    slower = others[-1].time.seconds / choice.time.seconds - 1
    assert others[-1].reason.startswith(f"{slower:.1%} slower")


def test_nothing_fits():
    plan = make_plan("ernie-4.5-300b-a47b", "h100:8", seq_len=4096)
    assert plan.choice is None and plan.to_json()["fits"] is False
    assert "take more devices" in plan.advice and "GiB of 67.1 a device" in plan.advice
    sizes = [candidate.memory.bytes for candidate in plan.alternatives]
    assert sizes == sorted(sizes) and sizes[0] > plan.budget
    # 12 bytes a weight of 302 billion over 8 devices are 422 GiB.
    assert sizes[0] / 2**30 > 422
    assert plan.alternatives[0].reason.startswith(f"needs {sizes[0] / 2**30:.0f} GiB of 67")


def test_json_is_what_was_promised(quickstart):
    found = quickstart.to_json()
    assert found.keys() >= KEYS and found["fits"] is True
    assert math.prod(found["mesh"].values()) == 8 and list(found["mesh"]) == ["pipeline", "data", "expert", "tensor"]
    assert sum(found["memory"].values()) == pytest.approx(found["memory_gib"], abs=1e-2)
    assert found["tokens_per_s"] == pytest.approx(64 * 512 / found["step_time_s"])
    assert found["step_time_s"] == pytest.approx(sum(p["seconds"] for p in found["time"] if p["kind"] != "hidden"))
    assert all({"kind", "axis", "bytes", "count"} <= use.keys() for use in found["collectives"])
    assert all({"mesh", "step_time_s", "memory_gib", "fits", "reason"} <= other.keys() for other in found["alternatives"])


def test_a_shape_of_ones_own_and_defaults():
    plan = make_plan(tiny_moe(), NODE)
    assert plan.model == "custom"
    # 8 rows a device, as long as the model has positions for.
    assert plan.choice.run.batch_size == 64
    assert plan.choice.run.seq_len == min(4096, tiny_moe().max_position_embeddings)


def test_the_package_can_be_called_before_and_after_its_modules_are_imported():
    importlib.import_module("ernie_jax.plan.links")
    assert isinstance(ej.plan("quickstart", NODE, seq_len=128, mesh={"data": 8}, zero=0), Plan)
    signature = inspect.signature(ej.plan)
    assert signature == inspect.signature(make_plan)
    assert list(signature.parameters)[:3] == ["model", "topology", "global_tokens"]
    assert "plan" in ej.__all__
    fresh = (
        "import sys, ernie_jax as ej\n"
        "assert not [m for m in sys.modules if m.startswith('ernie_jax.plan')]\n"
        "assert ej.plan('quickstart', 'h100:8', seq_len=128, mesh={'data': 8}, zero=0).choice.fits\n"
        "import ernie_jax.plan.links\n"
        "assert callable(ej.plan) and ej.plan.links.COLLECTIVES"
    )
    subprocess.run([sys.executable, "-c", fresh], check=True, timeout=300)
    with pytest.raises(AttributeError, match="plam"):
        _ = ej.plam


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "ernie-4.5-300b-a4b"}, "unknown preset 'ernie-4.5-300b-a4b' .did you mean 'ernie-4.5-300b-a47b'"),
        ({"topology": "h101:8"}, "topology 'h101:8' is not known .did you mean 'h100'"),
        ({"topology": "none.yaml"}, "topology file none.yaml does not exist"),
        ({"dtype": "bfloat"}, "plan.dtype='bfloat'.*did you mean 'bfloat16'"),
        ({"optimizer": "adam"}, "unknown optimizer 'adam' .did you mean 'adamw'"),
        ({"schedule": "1f1"}, "plan.schedule='1f1'.*did you mean '1f1b'"),
        ({"dispatch": "all_two_all"}, "plan.dispatch='all_two_all'.*did you mean 'all_to_all'"),
        ({"remat": "ful"}, "unknown remat policy 'ful' .did you mean 'full'"),
        ({"remat": "auto"}, "plan.remat='auto'; leave it out"),
        ({"zero": 2}, "plan.zero=2; expected 0"),
        ({"global_tokens": 1000, "seq_len": 128}, "global_tokens=1000 are no whole rows of seq_len=128 tokens; take 896 or 1024"),
        ({"global_tokens": 100, "seq_len": 128}, "take 128$"),
        ({"global_tokens": 0}, "global_tokens=0; expected a positive whole number"),
        ({"seq_len": -4}, "seq_len=-4; expected a positive whole number"),
        ({"seq_len": 4096}, "seq_len=4096 is beyond the model's max_position_embeddings=2048"),
        ({"microbatches": 0}, "plan.microbatches=0; expected a positive whole number"),
        ({"memory_budget": 1.5}, "memory_budget=1.5; expected a share"),
        ({"capacity_factor": -1.0}, "plan.capacity_factor=-1.0; expected a positive number"),
        ({"mesh": {"data": 3}}, "mesh .data=3. makes groups of 3 devices, which do not fill the 8 of h100:8"),
        ({"mesh": {"data": 2, "expert": 2, "tensor": 1, "pipeline": 1}}, "choose sizes whose product is 8"),
        ({"mesh": {"dat": 2}}, "mesh axis 'dat' is not known .did you mean 'data'"),
        ({"mesh": {"data": 0}}, "mesh axis data=0; expected a positive whole number"),
        ({"mesh": {"expert": 1, "pipeline": 8}}, "3 repeating layers cannot be spread over 8 pipeline stages"),
        ({"global_tokens": 3 * 128, "seq_len": 128, "mesh": {"data": 8}}, "no mesh of 8 devices divides the model and 3 rows"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_plan(**{"model": "quickstart", "topology": "h100:8", **arguments})
