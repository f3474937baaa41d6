import dataclasses
import os

import jax
import pytest
import yaml

from ernie_jax.plan.topologies import TOPOLOGIES, load_topology, measure_cpu, topology_named
from ernie_jax.plan.topology import Link, Topology
from ernie_jax.train.flops import peak_flops

MINE = """
name: mine:16
platform: gpu
device: a card of ours
devices: 16
devices_per_node: 4
memory_bytes: 40e9
flops: {float32: 50e12, bfloat16: 1.0e+14}
memory_bandwidth: 1.5e12
intra: {bandwidth: 100e9, latency: 1e-6}
inter: {bandwidth: 10000000000, latency: 1.0e-5, efficiency: 0.5}
matmul_efficiency: 0.75
"""


def mine(**changes):
    link = Link(bandwidth=100e9, latency=1e-6)
    fields = {
        "name": "mine:16",
        "platform": "gpu",
        "device": "a card of ours",
        "devices": 16,
        "devices_per_node": 4,
        "memory_bytes": 40 * 10**9,
        "flops": {"float32": 50e12, "bfloat16": 100e12},
        "memory_bandwidth": 1.5e12,
        "intra": link,
        "inter": Link(bandwidth=10e9, latency=1e-5, efficiency=0.5),
        "matmul_efficiency": 0.75,
        "sources": {},
    }
    return Topology(**fields | changes)


def written(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_figure_of_the_catalogue_has_a_source(name):
    topology = topology_named(name)
    assert topology.unsourced == ()
    assert {"memory_bytes", "flops.bfloat16", "intra.latency", "inter.efficiency", "torus"} <= set(topology.sources)
    assert topology.nodes == 1 and topology.name == f"{name}:{topology.devices_per_node}"


# Read from the data sheets apart from the catalogue: TFLOP/s in float32, bf16, fp8; GB of memory; TB/s of it; GB/s one way of a
# device within a node and between nodes.
@pytest.mark.parametrize(
    ("name", "flops", "memory", "bandwidth", "intra", "inter"),
    [
        ("a100-80", (156, 312, 312), 80, 2.039, 300, 25),
        ("h100", (494.7, 989.4, 1978.8), 80, 3.35, 450, 50),
        ("h800", (494.7, 989.4, 1978.8), 80, 3.35, 200, 50),
        ("h200", (494.7, 989.4, 1978.8), 141, 4.8, 450, 50),
        ("b200", (1100, 2250, 4500), 180, 7.7, 900, 50),
        ("v5e", (197, 197, 197), 16, 0.819, 100, 3.125),
        ("v5p", (459, 459, 459), 102.005, 2.765, 200, 6.25),
        ("v6e", (918, 918, 918), 32, 1.638, 200, 12.5),
    ],
)
def test_figures_of_data_sheets(name, flops, memory, bandwidth, intra, inter):
    topology = topology_named(name)
    assert [topology.peak(dtype) / 1e12 for dtype in ("float32", "bfloat16", "fp8")] == pytest.approx(flops)
    assert topology.memory_bytes / 1e9 == pytest.approx(memory, rel=1e-5)
    assert topology.memory_bandwidth / 1e12 == pytest.approx(bandwidth)
    assert topology.intra.bandwidth / 1e9 == pytest.approx(intra)
    assert topology.inter.bandwidth / 1e9 == pytest.approx(inter)


def test_sizes_of_nodes():
    assert topology_named("h100:512").nodes == 64
    assert topology_named("h100:4").nodes == 1
    # Slices are the nodes of a TPU.
    assert topology_named("v5e:512").nodes == 2
    assert topology_named("v5p:2048").nodes == 1
    assert topology_named("h100").with_devices(64) == topology_named("h100:64")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h10:8", "did you mean 'h100'"),
        ("b20", "did you mean 'b200'"),
        ("tpu9", "there are a100-80, h100"),
        ("h100:", "'' is no number of devices; write h100:8"),
        ("h100:0", "'0' is no number of devices"),
        ("h100:many", "'many' is no number of devices"),
        ("h100:12", "no whole number of nodes of 8; take 8 or 16, or at most 8"),
        ("v5e:300", "take 256 or 512"),
        ("cpu:0", "'0' is no number of devices"),
    ],
)
def test_names_that_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        topology_named(name)


def test_fake_devices_share_the_machine():
    eight, two = topology_named("cpu:8"), measure_cpu(2)
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert eight.unsourced == () and (eight.name, eight.nodes) == ("cpu:8", 1)
    assert eight.memory_bytes == host // 8 and two.memory_bytes == host // 2
    # Other work on the machine moves measurements, but not by ten.
    together = peak_flops(jax.devices("cpu")[:1]).flops
    assert together / 10 < 8 * eight.peak("float32") < 10 * together
    assert 0.1 < 8 * eight.memory_bandwidth / (2 * two.memory_bandwidth) < 10
    assert 8 * eight.memory_bandwidth > 1e8


def test_a_dtype_without_a_figure_is_refused():
    assert mine().peak("bfloat16") == 100e12
    with pytest.raises(ValueError, match="mine:16 has no peak for dtype 'fp8'; it has float32, bfloat16"):
        mine().peak("fp8")


def test_a_topology_keeps_its_own_tables():
    flops = {"float32": 1e12, "bfloat16": 2e12}
    topology = mine(flops=flops)
    flops["bfloat16"] = 3e12
    assert topology.peak("bfloat16") == 2e12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"platform": "gpus"}, r"topology.platform='gpus'; expected one of .* \(did you mean 'gpu'\?\)"),
        ({"devices": 0}, "topology.devices=0; expected a whole number of at least 1"),
        ({"devices": 18}, "take 16 or 20"),
        ({"memory_bytes": True}, "topology.memory_bytes=True"),
        ({"memory_bandwidth": float("nan")}, "topology.memory_bandwidth=nan; expected a positive number"),
        ({"matmul_efficiency": 70}, "topology.matmul_efficiency=70; expected a share"),
        ({"flops": {"float32": 1.0}}, "topology.flops lacks 'bfloat16'"),
        ({"flops": {"float32": 1.0, "bfloat61": 1.0}}, "did you mean 'bfloat16'"),
        ({"flops": {"float32": 1.0, "bfloat16": -1.0}}, "topology.flops.bfloat16=-1.0"),
        ({"sources": {"intra.bandwith": "a sheet"}}, "did you mean 'intra.bandwidth'"),
    ],
)
def test_values_that_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        mine(**changes)


def test_a_file_of_ones_own(tmp_path):
    path = written(tmp_path, MINE)
    topology = load_topology(path)
    assert dataclasses.replace(topology, sources={}) == mine()
    assert topology.unsourced == () and topology.sources["inter.latency"] == f"stated in {path}"
    assert load_topology(str(path)) == topology


def test_a_source_in_a_file_is_kept(tmp_path):
    topology = load_topology(written(tmp_path, MINE + "sources: {memory_bytes: the invoice}\n"))
    assert topology.sources["memory_bytes"] == "the invoice"
    assert topology.sources["flops.bfloat16"].startswith("stated in")


@pytest.mark.parametrize("name", ["b200:16", "v5p:64"])
def test_a_topology_goes_through_a_file_unchanged(tmp_path, name):
    topology = topology_named(name)
    assert load_topology(written(tmp_path, yaml.safe_dump(dataclasses.asdict(topology)))) == topology


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory_bytes: 40e9\n", "", r"topology lacks topology.memory_bytes$"),
        ("latency: 1e-6", "latancy: 1e-6", r"unknown key topology.intra.latancy \(did you mean 'latency'\?\)"),
        (", latency: 1e-6", "", "topology.intra lacks topology.intra.latency"),
        ("devices_per_node:", "device_per_node:", r"unknown key topology.device_per_node \(did you mean 'devices_per_node'\?\)"),
        ("bandwidth: 100e9", "bandwidth: -100e9", "topology.intra: link.bandwidth=-100000000000.0; expected a positive number"),
        ("bandwidth: 100e9", "bandwidth: fast", "topology.intra: link.bandwidth='fast'; expected a positive number"),
        ("bandwidth: 100e9", "bandwidth: 100 GB/s", "link.bandwidth='100 GB/s'"),
        ("matmul_efficiency: 0.75", "matmul_efficiency: '0.75'", "topology.matmul_efficiency='0.75'"),
        ("devices: 16", "devices: sixteen", "topology.devices='sixteen'; expected a whole number"),
        ("memory_bytes: 40e9", "memory_bytes: 0.5", "topology.memory_bytes=0.5; expected a whole number"),
        ("name: mine:16", "name: 16", "topology.name=16; expected text"),
        ("platform: gpu", "platform:", "topology.platform=None; expected text"),
        ("intra: {bandwidth: 100e9, latency: 1e-6}", "intra: 100e9", "topology.intra holds 100000000000.0; expected a mapping"),
        ("flops: {float32: 50e12, bfloat16: 1.0e+14}", "flops: 1e14", "topology.flops holds 100000000000000.0"),
        ("flops: {float32: 50e12,", "flops: {1: 50e12,", "topology.flops has 1"),
    ],
)
def test_files_that_are_refused(tmp_path, old, new, message):
    assert old in MINE
    path = written(tmp_path, MINE.replace(old, new, 1))
    with pytest.raises(ValueError, match=message) as caught:
        load_topology(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds nothing; expected a mapping"),
        ("- h100\n- h200\n", r"holds \['h100', 'h200'\]; expected a mapping"),
        ("name: [", "is no YAML"),
        ("name: !!python/object/apply:os.getcwd []\n", "is no YAML"),
    ],
)
def test_files_without_a_mapping_are_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        load_topology(written(tmp_path, text))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"none.yaml does not exist"):
        load_topology(tmp_path / "none.yaml")
