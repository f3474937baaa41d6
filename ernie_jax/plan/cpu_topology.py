"""Fake CPU devices as a topology, measured where they stand."""

from __future__ import annotations

import os
import time

import jax
import numpy as np

from ernie_jax.plan.topology import Link, Topology
from ernie_jax.train.flops import peak_flops

_TURNS = 4


def measure_cpu(devices: int) -> Topology:
    """`devices` fake CPU devices of this machine, each with its part of what the machine does and holds.

    Measured within two seconds: the float32 product that `train.flops` takes for the peak, and a copy. It needs no fake devices to
    exist: they would share the cores anyhow.

    Raises:
      ValueError: fewer than one device.
    """
    if devices < 1:
        raise ValueError(f"cpu:{devices}; expected at least 1 device")
    # The best of some turns each: what else the machine does would change the relation of the two, and with it every plan.
    products, copies = zip(*((peak_flops(jax.devices("cpu")[:1]).flops, _copy_bandwidth()) for _ in range(_TURNS)), strict=True)
    flops, bandwidth = max(value for value in products if value is not None), max(copies) / devices
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // devices
    part = f"1/{devices} of this machine"
    product, copy = f"measured: float32 product, {part}", f"measured: bytes read and written by a copy, {part}"
    link = Link(bandwidth=bandwidth / 2, latency=2e-5)
    sources = {
        "devices_per_node": "all fake devices are in one process",
        "memory_bytes": f"physical memory, {part}",
        "memory_bandwidth": copy,
        "matmul_efficiency": "1: the peak is itself a measured product",
        "torus": "none: devices share memory",
        "flops.float32": product,
        "flops.bfloat16": f"assumed: as float32 ({product})",
        "flops.fp8": f"assumed: as float32, no processor path is faster ({product})",
    }
    for level in ("intra", "inter"):
        sources |= {
            f"{level}.bandwidth": f"half of the memory bandwidth: a message is read and written ({copy})",
            f"{level}.latency": "assumed: small collectives of 8 devices take 0.14 to 0.17 ms on two cores, over 7 or 14 steps",
            f"{level}.efficiency": "1: the bandwidth is itself measured",
        }
    return Topology(
        name=f"cpu:{devices}",
        platform="cpu",
        device="fake CPU device",
        devices=devices,
        devices_per_node=devices,
        memory_bytes=memory,
        flops=dict.fromkeys(("float32", "bfloat16", "fp8"), flops / devices),
        memory_bandwidth=bandwidth,
        intra=link,
        inter=link,
        matmul_efficiency=1.0,
        sources=sources,
    )


def _copy_bandwidth(size: int = 1 << 26, seconds: float = 0.2) -> float:
    """Best bytes/s, read and written, of a copy of `size` bytes over about `seconds`."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - start)
    return 2 * size / best
