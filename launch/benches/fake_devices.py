"""The environment of a worker that is to see a given number of CPU devices."""

from __future__ import annotations

import os

FLAG = "--xla_force_host_platform_device_count"


def fake_devices(count: int, *, cpu: bool = False) -> dict[str, str]:
    """Variables under which JAX has `count` CPU devices, whatever XLA_FLAGS says now; its other flags stay.

    Args:
      count: of CPU devices; real accelerators are seen all the same.
      cpu: see no accelerator.
    """
    others = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(f"{FLAG}=")]
    flags = {"XLA_FLAGS": " ".join([*others, f"{FLAG}={count}"])}
    return flags | {"JAX_PLATFORMS": "cpu"} if cpu else flags
