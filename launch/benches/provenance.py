"""Where a measurement comes from: hardware, versions, commit, command."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import jax


def provenance() -> dict[str, object]:
    """The fields every bench adds to its result."""
    return {
        "hardware": {
            "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
            "platform": jax.default_backend(),
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        },
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "jaxlib": metadata.version("jaxlib")},
        "commit": _commit(),
        "command": shlex.join(["python", *sys.argv]),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of this checkout, marked `-dirty` with uncommitted changes; None outside a git checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
