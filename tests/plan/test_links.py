import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ernie_jax.plan.links import COLLECTIVES, Group, collective_seconds, group_along, placement
from ernie_jax.plan.topologies import topology_named
from ernie_jax.plan.topology import Link, Topology
from ernie_jax.sharding.mesh import MESH_AXES, make_mesh
from ernie_jax.testing.hlo import COLLECTIVES as HLO_COLLECTIVES
from ernie_jax.testing.hlo import Collective

# 4 nodes of 4 devices: 100 GB/s and 1 us within, 10 GB/s and 10 us between.
NODES = Topology(
    name="nodes:16",
    platform="gpu",
    device="round figures",
    devices=16,
    devices_per_node=4,
    memory_bytes=10**9,
    flops={"float32": 1e12, "bfloat16": 2e12},
    memory_bandwidth=1e12,
    intra=Link(bandwidth=100e9, latency=1e-6),
    inter=Link(bandwidth=10e9, latency=1e-5),
    matmul_efficiency=1.0,
    sources={},
)
MESH = {"pipeline": 2, "data": 2, "expert": 2, "tensor": 2}
US = 1e-6


def test_kinds_are_those_of_hlo():
    assert sorted(COLLECTIVES) == sorted(HLO_COLLECTIVES)


def test_devices_are_numbered_as_the_mesh_lays_them_out():
    eight = NODES.with_devices(8)
    mesh = make_mesh(pipeline=2, expert=2, tensor=2)
    numbers = np.vectorize(lambda device: device.id)(mesh.devices)
    assert mesh.axis_names == MESH_AXES
    np.testing.assert_array_equal(placement(eight, dict(mesh.shape)), numbers // 4)


@pytest.mark.parametrize(
    ("axes", "group"),
    [
        ((), Group(1, 1, 1)),
        (("tensor",), Group(2, 1, 2)),
        (("expert", "tensor"), Group(4, 1, 4)),
        (("data",), Group(2, 2, 1)),  # devices 0 and 4
        (("data", "tensor"), Group(4, 2, 2)),  # 0 1 4 5
        (("tensor", "data"), Group(4, 2, 2)),
        (("pipeline", "data"), Group(4, 4, 1)),  # 0 4 8 12
        (MESH_AXES, Group(16, 4, 4)),
    ],
)
def test_members_of_groups_in_nodes(axes, group):
    assert group_along(NODES, MESH, axes) == group


def test_groups_that_nodes_cut_unevenly_count_as_the_worst():
    # 0 1 2 and 3 4 5 lie in the first node of 8; 6 7 | 8 does not.
    topology = dataclasses.replace(NODES, devices=24, devices_per_node=8)
    group = group_along(topology, {"data": 8, "tensor": 3}, ("tensor",))
    assert group == Group(3, 2, 1) and not group.even
    # A ring over the slower link: 2 steps of 1 MB at 10 GB/s, 100 us, and 10 us each.
    assert collective_seconds(topology, {"data": 8, "tensor": 3}, "all-gather", ("tensor",), 3e6) == pytest.approx(220 * US)


@pytest.mark.parametrize(
    ("kind", "axes", "size", "microseconds"),
    [
        # Two in a node, 8 MB: half of it at 100 GB/s is 40 us, and one step of 1 us.
        ("all-gather", ("tensor",), 8e6, 41),
        ("reduce-scatter", ("tensor",), 8e6, 41),
        ("all-reduce", ("tensor",), 8e6, 82),
        # Four in a node: 3/4 of 8 MB is 60 us, 3 steps.
        ("all-gather", ("expert", "tensor"), 8e6, 63),
        # Two in two nodes: 4 MB at 10 GB/s is 400 us, one step of 10 us.
        ("all-gather", ("data",), 8e6, 410),
        ("all-reduce", ("data",), 8e6, 820),
        # Two in each of two nodes: 41 us within; each then sends half of its 4 MB, 200 us and 10 us.
        ("all-gather", ("data", "tensor"), 8e6, 251),
        ("reduce-scatter", ("data", "tensor"), 8e6, 251),
        ("all-reduce", ("data", "tensor"), 8e6, 502),
        # All 16 in four nodes, 16 MB: 12 MB within, 120 + 3 us; 3/4 of 4 MB between, 300 + 30 us.
        ("all-gather", MESH_AXES, 16e6, 453),
        # Four in a node, 2 MB to each of three peers: 3 x (20 + 1) us.
        ("all-to-all", ("expert", "tensor"), 8e6, 63),
        # 1 MB to each of 15 peers: 3 within take 3 x (10 + 1) us, 12 elsewhere 12 x (100 + 10) us at the same time.
        ("all-to-all", MESH_AXES, 16e6, 1320),
        ("ragged-all-to-all", MESH_AXES, 16e6, 1320),
        # 1 MB: 10 + 1 us within a node, 100 + 10 us to another.
        ("collective-permute", ("tensor",), 1e6, 11),
        ("collective-permute", ("pipeline",), 1e6, 110),
        # Device 1 sends to device 4.
        ("collective-permute", ("data", "tensor"), 1e6, 110),
    ],
)
def test_times_worked_out_by_hand(kind, axes, size, microseconds):
    assert collective_seconds(NODES, MESH, kind, axes, size) == pytest.approx(microseconds * US)


def test_an_exchange_takes_as_long_as_its_slower_level():
    # Between nodes 12 x 1 MB at 1000 GB/s is 12 us, less than the 33 us within.
    fast = dataclasses.replace(NODES, inter=Link(bandwidth=1e12, latency=0.0))
    assert collective_seconds(fast, MESH, "all-to-all", MESH_AXES, 16e6) == pytest.approx(33 * US)


def test_bandwidth_counts_as_far_as_it_is_reached():
    half = dataclasses.replace(NODES, intra=Link(bandwidth=100e9, latency=1e-6, efficiency=0.5))
    assert collective_seconds(half, MESH, "all-gather", ("tensor",), 8e6) == pytest.approx(81 * US)


def test_an_exchange_on_a_torus_passes_through_others():
    # 512 chips are 8 x 8 x 8. Along one ring of 8: 8/4 of 8 MB at 100 GB/s is 160 us, and 7 steps; a switch takes 7 x 10 us.
    torus = dataclasses.replace(NODES, platform="tpu", devices=512, devices_per_node=512, torus=3)
    mesh = {"data": 64, "expert": 8}
    assert collective_seconds(torus, mesh, "all-to-all", ("expert",), 8e6) == pytest.approx(167 * US)
    assert collective_seconds(dataclasses.replace(torus, torus=0), mesh, "all-to-all", ("expert",), 8e6) == pytest.approx(77 * US)
    # Two neighbours: half of 8 MB either way.
    pairs = {"data": 256, "expert": 2}
    assert collective_seconds(torus, pairs, "all-to-all", ("expert",), 8e6) == pytest.approx(41 * US)


def test_bytes_between_nodes_are_those_counted_in_compiled_programs():
    # Another count, device by device, of an exchange of 16 MB a device among all 16.
    exchange = Collective("all-to-all", (), "", 16 * 10**6, (tuple(range(16)),))
    each = exchange.bytes_between(4) / 16
    silent = dataclasses.replace(NODES, inter=Link(bandwidth=10e9, latency=0.0))
    assert collective_seconds(silent, MESH, "all-to-all", MESH_AXES, 16e6) == pytest.approx(each / 10e9)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_an_axis_within_a_node_is_faster_than_one_across(kind):
    topology, mesh = topology_named("h800:64"), {"data": 8, "tensor": 8}
    within = collective_seconds(topology, mesh, kind, ("tensor",), 1e8)
    assert 0 < within < collective_seconds(topology, mesh, kind, ("data",), 1e8)


@given(
    kind=st.sampled_from(sorted(COLLECTIVES)),
    axes=st.sets(st.sampled_from(MESH_AXES), min_size=1),
    smaller=st.floats(0, 1e12),
    more=st.floats(0, 1e12),
)
def test_more_bytes_take_no_less_time(kind, axes, smaller, more):
    axes = tuple(axes)
    first = collective_seconds(NODES, MESH, kind, axes, smaller)
    assert 0 < first <= collective_seconds(NODES, MESH, kind, axes, smaller + more)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_a_device_alone_waits_for_nobody(kind):
    mesh = {"data": 16}
    assert collective_seconds(NODES, mesh, kind, ("tensor",), 1e9) == 0
    assert collective_seconds(NODES, mesh, kind, (), 1e9) == 0


@pytest.mark.parametrize(
    ("mesh", "kind", "axes", "size", "message"),
    [
        (MESH, "all-gathers", ("data",), 1, r"collective 'all-gathers' is not known \(did you mean 'all-gather'\?\)"),
        (MESH, "all-gather", ("experts",), 1, r"mesh axis 'experts' is not known \(did you mean 'expert'\?\)"),
        (MESH, "all-gather", ("data", "data"), 1, "repeat one"),
        (MESH, "all-gather", ("data",), -1, "bytes=-1 of the all-gather"),
        (MESH, "all-gather", ("data",), float("nan"), "bytes=nan"),
        ({**MESH, "tensors": 1}, "all-gather", ("data",), 1, "mesh axis 'tensors' is not known"),
        ({"data": -1}, "all-gather", ("data",), 1, "mesh axis data=-1; expected a positive whole number"),
        ({"data": 8}, "all-gather", ("data",), 1, r"data=8, .* needs 8 devices, but nodes:16 has 16"),
    ],
)
def test_what_is_refused(mesh, kind, axes, size, message):
    with pytest.raises(ValueError, match=message):
        collective_seconds(NODES, mesh, kind, axes, size)
