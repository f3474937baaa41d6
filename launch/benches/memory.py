"""Resident memory of this process, where Linux tells it."""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def resident_bytes() -> int | None:
    """Memory the process holds now; None where the system does not tell."""
    return _field("VmRSS:")


def peak_bytes() -> int | None:
    """Most memory the process has held since `reset_peak`; None where the system does not tell."""
    return _field("VmHWM:")


def trim() -> None:
    """Gives memory that is free but held back by the allocator (what compilation left behind) to the system."""
    gc.collect()
    if sys.platform == "linux":
        # Other C libraries than glibc have no such call.
        trim_call = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim_call is not None:
            trim_call(0)


def reset_peak() -> bool:
    """Makes the peak count from now; False where the system cannot, so that no peak may be reported."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


def _field(name: str) -> int | None:
    if not _STATUS.exists():
        return None
    for line in _STATUS.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return None
