"""Devices to compile for: fake ones of the CPU, or those of a TPU or GPU compiler that runs without its machine.

TPU: `libtpu` compiles for a slice named by generation and shape. GPU: the CUDA plugin compiles for a card described by a text
that it carries itself (`--xla_gpu_target_config_filename` of XLA reads the same format). Neither needs a chip, a driver or CUDA.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from ernie_jax.plan.topology import Topology

# Package whose plugin compiles for a platform, and the extra that brings it.
PLUGINS = {"tpu": ("libtpu", "tpu"), "gpu": ("jax_cuda12_plugin", "cuda12")}

# Cards of the catalogue by the names that the CUDA plugin's descriptions have.
_CARDS = {
    "NVIDIA A100": "NVIDIA A100-SXM4-80GB",
    "NVIDIA H100": "NVIDIA H100 80GB HBM3",
    "NVIDIA H800": "NVIDIA H100 80GB HBM3",
    "NVIDIA H200": "NVIDIA H200 141GB HBM3e",
    "NVIDIA B200": "NVIDIA B200",
}
# libtpu would wait for the metadata server of a cloud machine, the CUDA plugin refuse a machine without CUDA's libraries.
_WITHOUT_MACHINE = {"tpu": {"TPU_SKIP_MDS_QUERY": "1"}, "gpu": {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}}
# Both abort the GPU compiler where there is no GPU to ask.
_GPU_FLAGS = "--xla_gpu_enable_cub_radix_sort=false --xla_gpu_unsupported_use_all_reduce_one_shot_kernel=false"


def installed(platform: str) -> bool:
    """Whether this installation compiles for a platform; it always does for "cpu"."""
    return platform == "cpu" or importlib.util.find_spec(PLUGINS[platform][0]) is not None


def check_target(target: str, topology: Topology) -> None:
    """Refuse a target that cannot be compiled for.

    Raises:
      ValueError: neither "cpu" nor the topology's own platform, or its compiler is not installed.
    """
    if target not in ("cpu", topology.platform):
        raise ValueError(
            f"cannot compile for {target!r}: {topology.name} is a {topology.platform}; expected cpu or {topology.platform}"
        )
    if not installed(target):
        package, extra = PLUGINS[target]
        raise ValueError(f"compiling for a {target} needs {package}, which is not installed; pip install 'ernie-jax[{extra}]'")


def environment(target: str, devices: int) -> dict[str, str]:
    """Variables that a process needs from its start to compile for a target of so many devices."""
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
    if target == "cpu":
        flags.append(f"--xla_force_host_platform_device_count={devices}")
    elif target == "gpu":
        flags += _GPU_FLAGS.split()
    found = {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
    return found | _WITHOUT_MACHINE.get(target, {})


def target_devices(target: str, topology: Topology) -> Sequence[jax.Device]:
    """As many devices as the topology has, to make a mesh of and to compile for.

    Raises:
      ValueError: the target's compiler has no such machine.
    """
    if target == "cpu":
        return jax.devices("cpu")[: topology.devices]
    if target == "tpu":
        name = f"{topology.name.partition(':')[0]}:{'x'.join(map(str, slice_shape(topology.devices, topology.torus)))}"
        return _described("tpu", topology_name=name)
    per_node = min(topology.devices, topology.devices_per_node)
    shape = f"1x{topology.devices // per_node}x{per_node}"
    return _described("cuda", topology=shape, target_config=_target_config(topology.device))


def slice_shape(devices: int, dimensions: int) -> tuple[int, ...]:
    """The most even shape of a slice: powers of two as alike as can be, 512 in three dimensions 8 x 8 x 8, the longest last.

    Raises:
      ValueError: a number that is no power of two.
    """
    power = devices.bit_length() - 1
    if devices < 1 or devices != 1 << power:
        raise ValueError(f"a TPU slice of {devices} chips; expected a power of two")
    each, more = divmod(power, dimensions)
    return tuple(1 << (each + (axis >= dimensions - more)) for axis in range(dimensions))


def _described(platform: str, **options: Any) -> Sequence[jax.Device]:
    try:
        found: Sequence[jax.Device] = topologies.get_topology_desc(platform=platform, **options).devices
    except Exception as error:
        shown = ", ".join(f"{key}={value!r:.60}" for key, value in options.items())
        raise ValueError(f"the {platform} compiler has no machine {shown}: {error}") from error
    return found


def _target_config(device: str) -> str:
    """The text that describes a card, out of the CUDA plugin."""
    for card, name in _CARDS.items():
        if device.startswith(card):
            configs = _plugin_texts()
            if name in configs:
                return configs[name]
            raise ValueError(f"the CUDA plugin describes no {name!r}; it knows {', '.join(sorted(configs))}")
    raise ValueError(f"no description of {device!r} for the GPU compiler; it has {', '.join(_CARDS)}")


def _plugin_texts() -> Mapping[str, str]:
    """Card -> description, of all that the plugin's shared object holds."""
    spec = importlib.util.find_spec("jax_plugins.xla_cuda12")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("compiling for a gpu needs jax-cuda12-pjrt, which is not installed; pip install 'ernie-jax[cuda12]'")
    library = next(Path(spec.submodule_search_locations[0]).glob("xla_cuda_plugin*.so"))
    return parse_target_configs(library.read_bytes())


def parse_target_configs(blob: bytes) -> dict[str, str]:
    """Descriptions of cards as they stand in a shared object, by the card's name."""
    found = {}
    for match in re.finditer(rb"gpu_device_info \{[ -~\n\t]*", blob):
        text = match[0].decode("ascii")
        if name := re.search(r'device_description_str: "([^"]+)"', text):
            found[name[1]] = text
    return found
