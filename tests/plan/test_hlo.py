"""Collectives of a program in one run of it: of texts whose answer is known, and of compiled programs counted by hand."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ernie_jax.config.pipeline import PipelineConfig
from ernie_jax.config.run import DataConfig, MeshConfig, MoETrainConfig, RunConfig
from ernie_jax.models.batches import TEXT_KEYS
from ernie_jax.plan.hlo import CollectiveUse, program_collectives, summed
from ernie_jax.sharding import make_mesh
from ernie_jax.testing import tiny_moe
from ernie_jax.train.gradients import make_gradients
from ernie_jax.train.state import abstract_state, run_layout
from ernie_jax.train.step import make_train_step

MESH = {"data": 2, "expert": 4}
LOOPS = """
HloModule loops, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%inner_body (state: (s32[], f32[8])) -> (s32[], f32[8]) {
  %state = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[8]{0} get-tuple-element((s32[], f32[8]{0}) %state), index=1
  %two = s32[] constant(2)
  %next = s32[] add(%i, %two)
  %sum = f32[8]{0} all-reduce(f32[8]{0} %x), replica_groups=INNER, to_apply=%add, metadata={op_name="jit(f)/while/body/mlp/psum"}
  ROOT %out = (s32[], f32[8]{0}) tuple(%next, %sum)
}

%compare_computation (p0: s32[], p1: s32[]) -> pred[] {
  %p0 = s32[] parameter(0)
  %p1 = s32[] parameter(1)
  ROOT %less = pred[] compare(%p1, %p0), direction=GT
}

%inner_condition (state: (s32[], f32[8])) -> pred[] {
  %state = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %end = s32[] constant(9)
  ROOT %less = pred[] fusion(%i, %end), kind=kLoop, calls=%compare_computation
}

%outer_body (state: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {
  %state = (s32[], f32[8]{0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[8]{0} get-tuple-element(%state), index=1
  %start = s32[] get-tuple-element(%state), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %begin = (s32[], f32[8]{0}) tuple(%start, %x)
  %loop = (s32[], f32[8]{0}) while(%begin), condition=%inner_condition, body=%inner_body
  %y = f32[8]{0} get-tuple-element(%loop), index=1
  ROOT %out = (s32[], f32[8]{0}, s32[]) tuple(%next, %y, %start)
}

%outer_condition (state: (s32[], f32[8], s32[])) -> pred[] {
  %state = (s32[], f32[8]{0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %end = s32[] constant(OUTER)
  ROOT %less = pred[] compare(%i, %end), direction=LE
}

ENTRY %main (p: f32[8], n: s32[]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %n = s32[] parameter(1)
  %zero = s32[] constant(0)
  %three = s32[] constant(3)
  %begin = (s32[], f32[8]{0}, s32[]) tuple(%zero, %p, START)
  %loop = (s32[], f32[8]{0}, s32[]) while(%begin), condition=%outer_condition, body=%outer_body, metadata={op_name="f/while"}KNOWN
  ROOT %y = f32[8]{0} get-tuple-element(%loop), index=1
}
"""


def loops(inner="{{0,4},{1,5},{2,6},{3,7}}", outer="5", start="%three", known=""):
    return LOOPS.replace("INNER", inner).replace("OUTER", outer).replace("START", start).replace("KNOWN", known)


def test_rounds_are_read_from_conditions():
    """Inside from 3 below 9 by twos, 3 rounds; outside 0 to 5, 6 rounds. The first value inside comes through the outer loop."""
    assert program_collectives(loops(), MESH) == [CollectiveUse("all-reduce", "data", 18 * 32, 18.0, "mlp/psum", "f32", 2)]


def test_rounds_are_read_from_the_loop():
    known = ', backend_config={"known_init_step":{"init":"0"},"known_trip_count":{"n":"10"}}'
    (use,) = program_collectives(loops(known=known), MESH)
    assert use.count == 30


def test_rounds_that_depend_on_data():
    with pytest.raises(ValueError, match=r"loop loop \(no scope\) holds all-reduce and runs as often as its data say"):
        program_collectives(loops(start="%n"), MESH)
    quiet = loops(start="%n").replace("all-reduce(f32[8]{0} %x)", "negate(%x)")
    assert program_collectives(quiet, MESH) == []


@pytest.mark.parametrize(
    ("groups", "axis", "devices"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", "expert", 4),
        ("{{7,6,5,4},{0,1,3,2}}", "expert", 4),
        ("[2,4]<=[8]", "expert", 4),
        ("[4,2]<=[2,4]T(1,0)", "data", 2),
        ("mesh['data'=2,'expert'=4] {'data'}", "data", 2),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", "expert", 4),
        ("{}", "data+expert", 8),
        ("{{0,1},{2,3},{4,5},{6,7}}", "expert/inner", 2),
        ("[4,2]<=[2,2,2]T(0,2,1)", "expert/outer", 2),
        ("{{0,3},{1,2},{4,7},{5,6}}", "expert/part", 2),
        ("{{0,5},{1,6},{2,7},{3,4}}", "data+expert/part", 2),
        ("{{0,1,2,3}}", "?", 4),
        ("{{0,1,2},{3,4,5,6,7}}", "?", 5),
    ],
)
def test_axes_of_every_notation(groups, axis, devices):
    (use,) = program_collectives(loops(groups), {"expert": 4, "data": 2, "tensor": 1})
    assert (use.axis, use.devices) == (axis, devices)


def test_devices_that_are_not_in_the_mesh_and_devices_alone():
    with pytest.raises(ValueError, match="names device 7, but the mesh has 4"):
        program_collectives(loops(), {"expert": 4})
    with pytest.raises(ValueError, match="mesh axes model; expected some of pipeline, data"):
        program_collectives(loops(), {"model": 8})
    assert program_collectives(loops("{{0},{1},{2},{3},{4},{5},{6},{7}}"), MESH) == []
    with pytest.raises(ValueError, match="no ENTRY computation"):
        program_collectives("func.func @main() {\n}", MESH)


KINDS = """
%wrapped (p: bf16[16]) -> bf16[4] {
  %p = bf16[16]{0} parameter(0)
  ROOT %rs = bf16[4]{0} reduce-scatter(%p), replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add
}

%all-reduce-scatter.1 (p: f32[64]) -> f32[16] {
  %p = f32[64]{0:T(128)} parameter(0)
  %all = f32[64]{0:T(128)} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %slice = f32[16]{0:T(128)} dynamic-slice(%all, %at), dynamic_slice_sizes={16}
}

%begun (p: f32[8]) -> (f32[8], f32[32]) {
  %all = f32[32]{0} all-gather(%p), replica_groups=[2,4]<=[8], dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %custom-call.1 = (f32[8]{0}, f32[32]{0}) custom-call(%all), custom_call_target="AsyncCollectiveStart"
}

%awaited (p: f32[8]) -> f32[32] {
  %all = f32[32]{0} all-gather(%p), replica_groups=[2,4]<=[8], dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %custom-call.2 = f32[32]{0} custom-call(%p, %all), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %a = (f32[2]{0}, f32[2]{0}, /*index=2*/f32[2]{0}, f32[2]{0}) all-to-all(%p, %p, %p, /*index=3*/%p), replica_groups=[2,4]<=[8]
  %b = (f32[3]{0}, s32[]) all-reduce(%p, %n), replica_groups=[2,4]<=[8], to_apply=%add
  %c = ((bf16[16]{0}), bf16[4]{0}, u32[]) async-start(%p), calls=%wrapped
  %d = bf16[4]{0} async-done(%c), calls=%wrapped
  %e = (s8[8]{0}, s8[16]{0}) all-gather-start(%p), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}
  %f = s8[16]{0} all-gather-done(%e)
  %g = f32[8]{0} collective-permute(%p), source_target_pairs={{0,4},{1,5},{2,2}}
  %h = f32[8]{0} collective-permute(%p), source_target_pairs={{0,5},{5,0}}
  %i = f32[16]{0:T(128)} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1
  %j = (f32[8]{0}, f32[32]{0}) fusion(%p), kind=kCustom, calls=%begun
  %k = f32[32]{0} fusion(%p), kind=kCustom, calls=%awaited
  %l = f32[6]{0} ragged-all-to-all(%p, %p, %n, %n, %n, %n), replica_groups=[2,4]<=[8]
  ROOT %m = pred[5]{0} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%or
}
"""


def test_kinds_and_bytes():
    found = [(use.kind, use.axis, use.dtype, use.bytes) for use in program_collectives(KINDS, MESH)]
    assert found == [
        ("all-to-all", "expert", "f32", 32),
        ("all-reduce", "expert", "f32", 12),
        ("all-reduce", "expert", "s32", 4),
        ("reduce-scatter", "expert", "bf16", 32),
        ("all-gather", "data", "s8", 16),
        ("collective-permute", "data", "f32", 32),
        ("collective-permute", "data+expert", "f32", 32),
        ("reduce-scatter", "expert", "f32", 256),
        ("all-gather", "expert", "f32", 128),
        ("ragged-all-to-all", "expert", "f32", 24),
        ("all-reduce", "expert", "pred", 5),
    ]
    total = {(use.kind, use.axis, use.dtype): (use.bytes, use.count) for use in summed(program_collectives(KINDS, MESH))}
    assert total["reduce-scatter", "expert", "f32"] == (256, 1)
    uses = [CollectiveUse("all-reduce", "data", size, 2.0, name, "f32", 2) for size, name in ((8, "a"), (24, "b"))]
    assert summed([*uses, CollectiveUse("all-reduce", "data", 64, 1.0, "c", "bf16", 2)]) == [
        CollectiveUse("all-reduce", "data", 64, 1.0, "c", "bf16", 2),
        CollectiveUse("all-reduce", "data", 32, 4.0, "b", "f32", 2),
    ]


BRANCHES = """
%head (p: f32[8]) -> f32[8] {
  ROOT %a = f32[8]{0} all-reduce(%p), replica_groups=[2,4]<=[8], metadata={op_name="f/ticks/cond/b/stage/cond/b/jvp(head)/psum"}
}

%no_head (p: f32[8]) -> f32[8] {
  ROOT %p = f32[8]{0} parameter(0)
}

%stage (p: f32[8]) -> f32[8] {
  %a = f32[100]{0} all-reduce(%p), replica_groups=[2,4]<=[8], metadata={op_name="f/ticks/cond/b/stage/psum"}
  ROOT %c = f32[8] conditional(%go, %p, %p), branch_computations={%no_head, %head}, metadata={op_name="f/ticks/cond/b/stage/cond"}
}

%idle (p: f32[8]) -> f32[8] {
  ROOT %a = f32[10]{0} all-reduce(%p), replica_groups=[2,4]<=[8], metadata={op_name="f/ticks/cond/a/psum"}
}

ENTRY %main (p: f32[8]) -> f32[8] {
  ROOT %c = f32[8] conditional(%go, %p, %p), true_computation=%stage, false_computation=%idle, metadata={op_name="f/ticks/cond"}
}
"""


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ({}, [400, 32]),
        ({"stage": 0.75}, [300, 24, 10]),
        # Inside and outside multiply; a scope around the conditional is none of its branches'.
        ({"stage": 0.75, "head": 0.5, "ticks": 0.1}, [300, 12, 10]),
        ({"ticks/stage": 0.25, "stage": 0.75, "stage/head": 0.0}, [100, 30]),
        ({"elsewhere/stage": 0.25, "nowhere": 0.0}, [400, 32]),
    ],
)
def test_branches_with_and_without_shares(shares, expected):
    assert [use.bytes for use in program_collectives(BRANCHES, MESH, shares=shares)] == expected


def test_shares_that_cannot_be():
    with pytest.raises(ValueError, match=r"share 1\.5 of scope 'stage'; expected a number from 0 to 1"):
        program_collectives(BRANCHES, MESH, shares={"stage": 1.5})
    with pytest.raises(ValueError, match=r"come to 1\.2; expected at most 1"):
        program_collectives(BRANCHES, MESH, shares={"psum": 0.6})


def test_a_large_mesh_and_a_large_program():
    """2,048 devices in every notation, and what is written often is looked up once."""
    devices = np.arange(2048).reshape(8, 8, 8, 4)
    expert = devices.transpose(0, 1, 3, 2).reshape(-1, 8).tolist()
    listed = "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in expert) + "}"
    line = "  %a.{n} = f32[8]{{0}} all-reduce(%p), replica_groups={groups}, to_apply=%add"
    notations = (listed, "[256,8]<=[64,8,4]T(0,2,1)", "mesh['p'=8,'d'=8,'e'=8,'t'=4] {'e'}")
    lines = [line.format(n=n, groups=notations[n % 3 if n < 100 else 1]) for n in range(3000)]
    text = "\n".join(["ENTRY %main (p: f32[8]) -> f32[8] {", *lines, "}"])
    (use,) = summed(program_collectives(text, {"pipeline": 8, "data": 8, "expert": 8, "tensor": 4}))
    assert (use.axis, use.count, use.bytes) == ("expert", 3000, 3000 * 32)


def test_a_scan_of_sums():
    """Three rounds, each with two rounds of a sum over `expert` and then one over `data` and `tensor`, of 5 x 7 floats."""
    mesh = make_mesh(data=2, expert=2, tensor=2)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    def program(x):
        def inner(x, _):
            return jax.lax.psum(jnp.sin(x), "expert"), None

        def outer(x, _):
            return jax.lax.psum(jnp.cos(jax.lax.scan(inner, x, length=2)[0]), ("data", "tensor")), None

        return jax.lax.scan(outer, x, length=3)[0]

    text = program.lower(jax.ShapeDtypeStruct((5, 7), jnp.float32)).compile().as_text()
    found = {(use.kind, use.axis): (use.count, use.bytes) for use in summed(program_collectives(text, mesh.shape))}
    assert found == {("all-reduce", "expert"): (6, 6 * 140), ("all-reduce", "data+tensor"): (3, 3 * 140)}


def tiny(sizes, model, **changes):
    """A run, its layout and the shapes of a batch: 8 rows of 12 tokens."""
    run = RunConfig(
        model=model,
        steps=9,
        batch_size=8,
        seq_len=12,
        data=DataConfig(kind="standard_library"),
        mesh=MeshConfig(**sizes),
        **changes,
    )
    layout = run_layout(run, make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())]))
    return run, layout, {key: jax.ShapeDtypeStruct((8, 12), np.int32) for key in TEXT_KEYS}


@pytest.mark.parametrize("remat", ["none", "full"])
def test_the_exchange_of_a_training_step(remat):
    """A row a device of 12 tokens to 2 of 8 experts on 4 devices, 2 MoE layers. Rows go there and back, and their gradients too;
    beside the rows go their experts (there) and weights' gradients (back in the backward). Recomputing sends rows and experts
    there once more, and no results back: no gradient needs them."""
    run, layout, batch = tiny({"expert": 4, "data": 2}, tiny_moe(num_experts_per_tok=2), remat=remat)
    text = make_train_step(run, layout).lower(abstract_state(run, layout), batch).compile().as_text()
    uses = [use for use in program_collectives(text, layout.mesh.shape) if use.kind == "all-to-all"]
    assert {use.axis for use in uses} == {"expert"} and {use.devices for use in uses} == {4}
    again = {"none": 0, "full": 1}[remat]
    rows = [use for use in uses if use.bytes == 2 * 4 * 12 * 32 * 4]  # layers x buckets x rows x width x float32
    assert sum(use.count for use in rows) == 2 * (2 + again + 2)
    assert sum(use.count for use in uses) == 2 * (3 + 2 * again + 3)


def test_permutes_of_a_pipeline():
    """Two stages and four microbatches of 1F1B: the last leaves the first stage at tick 3, comes to the second at 4, and its
    gradient reaches the first at 5. Every tick sends both ways, active or not."""
    model = tiny_moe(num_hidden_layers=5, num_experts_per_tok=2)
    pipeline = PipelineConfig(schedule="1f1b", microbatches=4)
    run, layout, batch = tiny(
        {"pipeline": 2, "expert": 2}, model, pipeline=pipeline, moe=MoETrainConfig(balance_scope="microbatch")
    )
    text = jax.jit(make_gradients(run, layout)).lower(abstract_state(run, layout), batch).compile().as_text()

    def counts(shares):
        uses = program_collectives(text, layout.mesh.shape, shares=shares)
        sends = [use for use in uses if use.kind == "collective-permute" and "pipeline_send" in use.scope]
        assert {use.axis for use in sends} == {"pipeline"}
        exchanges = [use for use in uses if use.kind == "all-to-all" and "moe_exchange" in use.scope]
        assert {use.axis for use in exchanges} == {"expert"}
        return sends, exchanges

    sends, every_tick = counts({})
    assert sum(use.count for use in sends) == 2 * 6
    # A microbatch is 2 rows of 12 tokens of 32 floats, a row on each of the devices of a stage.
    assert sum(use.bytes for use in sends) == 2 * 6 * 12 * 32 * 4
    _, active = counts({"stage_forward": 4 / 6, "stage_backward": 4 / 6})
    assert sum(use.count for use in active) == pytest.approx(sum(use.count for use in every_tick) * 4 / 6)
    # Two layers a stage, four microbatches, and in each a forward, another before the backward, and that.
    assert sum(use.count for use in active) == pytest.approx(2 * 4 * 3 * 3)
