"""Plans held against the compiler, in a real process; and what is compiled for without its machine."""

import dataclasses
import json

import pytest

from ernie_jax.config import default_config, run_config_from
from ernie_jax.plan.proof import Proofs, prove, targets_of
from ernie_jax.plan.targets import check_target, environment, installed, parse_target_configs, slice_shape
from ernie_jax.plan.topologies import topology_named


def staged_run(**mesh):
    config = default_config()
    config.model.preset, config.data.kind = "quickstart", "standard_library"
    config.batch_size, config.seq_len, config.remat = 8, 128, "full"
    config.moe.balance_scope = "microbatch"
    config.mesh.update(mesh)
    return run_config_from(config)


def test_a_step_compiled_in_another_process_is_what_was_predicted():
    run, topology = staged_run(pipeline=2, data=2, expert=2, zero=1), topology_named("cpu:8")
    proof = prove(run, topology)
    assert proof.target == "cpu" and proof.devices == 8 and proof.fits
    memory, everything, *others = proof.rows
    assert memory.name == "memory of a device" and memory.predicted == pytest.approx(memory.compiled, rel=0.1)
    assert everything.name == "all collectives" and everything.predicted == pytest.approx(everything.compiled, rel=0.05)
    assert others and all(row.predicted == pytest.approx(row.compiled, rel=0.05) for row in others)
    # What a device is given: state and batch, each its own part; the new state takes the old one's place.
    assert 0 < proof.memory["alias"] <= proof.memory["output"] <= proof.memory["argument"]
    assert proof.bytes == sum(proof.memory[kind] for kind in ("argument", "temp", "output")) - proof.memory["alias"]
    assert {use.axis for use in proof.collectives} >= {"pipeline", "expert"}
    written = json.loads(json.dumps(Proofs((proof,)).to_json()))
    assert written[0]["memory_gib"] == pytest.approx(proof.bytes / 2**30)
    assert "GiB a device, fits" in proof.sentence
    tight = dataclasses.replace(proof, memory_bytes=proof.bytes - 1)
    assert not tight.fits and "does not fit" in tight.sentence


def test_what_no_run_could_do_is_refused_as_a_run_would():
    with pytest.raises(ValueError, match=r"repeating layers cannot be spread over 8 pipeline stages"):
        prove(staged_run(pipeline=8), topology_named("cpu:8"))


def test_targets_are_the_cpu_and_the_topology_s_own_where_its_compiler_is_installed():
    machine = topology_named("h100:8")
    assert targets_of(topology_named("cpu:8")) == ["cpu"]
    assert targets_of(machine) == ["cpu", *["gpu"] * installed("gpu")]
    with pytest.raises(ValueError, match=r"cannot compile for 'tpu': h100:8 is a gpu; expected cpu or gpu"):
        check_target("tpu", machine)
    if not installed("gpu"):
        with pytest.raises(ValueError, match=r"needs jax_cuda12_plugin, which is not installed; pip install 'ernie-jax\[cuda12\]'"):
            check_target("gpu", machine)


def test_the_number_of_fake_devices_replaces_another(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3 --xla_dump_to=/nowhere")
    assert environment("cpu", 512)["XLA_FLAGS"].split() == ["--xla_dump_to=/nowhere", "--xla_force_host_platform_device_count=512"]
    assert "device_count" not in environment("gpu", 64)["XLA_FLAGS"]
    assert environment("tpu", 64)["TPU_SKIP_MDS_QUERY"] == "1"


@pytest.mark.parametrize(
    ("devices", "dimensions", "shape"),
    [(64, 3, (4, 4, 4)), (512, 3, (8, 8, 8)), (256, 2, (16, 16)), (128, 2, (8, 16)), (8, 3, (2, 2, 2))],
)
def test_slices_are_as_even_as_they_can_be(devices, dimensions, shape):
    assert slice_shape(devices, dimensions) == shape


def test_a_slice_of_no_power_of_two_is_refused():
    with pytest.raises(ValueError, match="a TPU slice of 96 chips; expected a power of two"):
        slice_shape(96, 3)


def test_descriptions_of_cards_are_found_between_other_bytes():
    text = b'gpu_device_info {\n  core_count: 132\n}\nplatform_name: "CUDA"\ndevice_description_str: "NVIDIA H100"\n'
    found = parse_target_configs(b"\x00\x7fELF" + text + b"\x00rest" + text.replace(b"H100", b"B200") + b"\xff")
    assert list(found) == ["NVIDIA H100", "NVIDIA B200"]
    assert found["NVIDIA B200"].startswith("gpu_device_info {\n  core_count: 132")
