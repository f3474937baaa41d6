"""The environment of a worker: how many CPU devices it sees, and the settings that make a CPU fast (docs/performance.md)."""

from __future__ import annotations

import os

FLAG = "--xla_force_host_platform_device_count"
# Loops over memory use the widest registers; by default XLA stops at 256 bits.
FAST_FLAGS = ("--xla_cpu_prefer_vector_width=512",)
# Large buffers come in pages of 2 MiB: a step that gets its buffers anew does not fault on each 4 KiB of them.
FAST_ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def fake_devices(count: int, *, cpu: bool = False) -> dict[str, str]:
    """Variables under which JAX has `count` CPU devices, whatever XLA_FLAGS says now; its other flags stay.

    Args:
      count: of CPU devices; real accelerators are seen all the same.
      cpu: see no accelerator.
    """
    given = os.environ.get("XLA_FLAGS", "").split()
    others = [flag for flag in FAST_FLAGS if not any(g.startswith(flag.split("=")[0] + "=") for g in given)]
    others += [flag for flag in given if not flag.startswith(f"{FLAG}=")]
    flags = fast_environment() | {"XLA_FLAGS": " ".join([*others, f"{FLAG}={count}"])}
    return flags | {"JAX_PLATFORMS": "cpu"} if cpu else flags


def fast_environment() -> dict[str, str]:
    """Settings for any side of a comparison, but for those that the user has set."""
    return {name: value for name, value in FAST_ENVIRONMENT.items() if name not in os.environ}
