"""Meshes and layouts: sizes, order, and errors that give the numbers."""

import jax
import pytest

import ernie_jax as ej
from ernie_jax.sharding import BATCH_AXES, make_layout, make_mesh, mesh_sizes
from ernie_jax.testing import tiny_moe


def test_minus_one_takes_the_rest():
    assert mesh_sizes(8, data=-1, tensor=2) == {"pipeline": 1, "data": 4, "expert": 1, "tensor": 2}
    mesh = ej.make_mesh(data=2, tensor=2, expert=-1)
    assert dict(mesh.shape) == {"pipeline": 1, "data": 2, "expert": 2, "tensor": 2}


def test_tensor_is_innermost_and_pipeline_outermost():
    ids = [d.id for d in make_mesh(pipeline=2, data=1, tensor=2, expert=2).devices.reshape(-1)]
    assert ids == sorted(ids)
    assert make_mesh(data=8).axis_names == ("pipeline", "data", "expert", "tensor")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 3}, r"pipeline=1, data=3, expert=1, tensor=1\) needs 3 devices, but there are 8"),
        ({"data": 16}, "needs 16 devices, but there are 8"),
        ({"data": -1, "tensor": 3}, "groups of 3 devices, which does not divide the 8"),
        ({"data": -1, "tensor": -1}, "data, tensor are all -1"),
        ({"data": 0}, "data=0; expected a positive integer"),
        ({"expert": -2}, "expert=-2; expected a positive integer"),
        ({"tensor": 2.0}, "tensor=2.0; expected a positive integer"),
        ({"data": True}, "data=True; expected a positive integer"),
    ],
)
def test_bad_sizes(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(**sizes)


@pytest.mark.parametrize(
    ("sizes", "changes", "rules", "message"),
    [
        (
            {"expert": 8},
            {"num_experts": 12},
            "tp_sp",
            r"moe.num_experts=12 cannot be split over expert=8 \(8 shards, remainder 4\)",
        ),
        ({"tensor": 8}, {}, "tp_sp", "num_attention_heads=4 cannot be split over tensor=8"),
        ({"data": 8}, {"hidden_size": 36}, "fsdp", "hidden_size=36 cannot be split over data=8 x expert=1"),
        ({"tensor": 2, "data": 4}, {"vocab_size": 63}, "tp_sp", "vocab_size=63 cannot be split over tensor=2"),
        ({"data": 8}, {}, "zero3", r"unknown sharding rules 'zero3'; expected one of \['fsdp', 'serve', 'tp_sp'\]"),
    ],
)
def test_bad_layouts(sizes, changes, rules, message):
    with pytest.raises(ValueError, match=message):
        make_layout(make_mesh(**sizes), tiny_moe(**changes), rules)


def test_kv_heads_yield_only_when_the_mesh_is_a_multiple():
    layout = make_layout(make_mesh(tensor=4, devices=jax.devices()[:4]), tiny_moe(num_key_value_heads=2))
    assert layout.rules.mesh_axes("kv_heads") == ()
    with pytest.raises(ValueError, match="num_key_value_heads=3 cannot be split over tensor=4"):
        make_layout(make_mesh(tensor=4, devices=jax.devices()[:4]), tiny_moe(num_attention_heads=12, num_key_value_heads=3))


def test_batch_axes():
    layout = make_layout(make_mesh(data=2, tensor=2, expert=2), tiny_moe())
    assert layout.axis_size(*BATCH_AXES) == layout.shards("batch") == 4
