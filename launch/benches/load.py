"""How much of this machine's cores other processes hold, where Linux tells it."""

from __future__ import annotations

import os
from pathlib import Path

_STAT = Path("/proc/stat")


def busy_seconds() -> float | None:
    """Processor seconds all processes have used so far on the cores this one may use, those the host took away included.

    None where the system does not tell. The fields are those of proc_stat(5).
    """
    if not _STAT.exists() or not hasattr(os, "sched_getaffinity"):
        return None
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = 0
    for line in _STAT.read_text().splitlines():
        name, *fields = line.split()
        if name in cores:
            user, nice, system, _, _, irq, soft_irq, steal = (int(field) for field in fields[:8])
            ticks += user + nice + system + irq + soft_irq + steal
    return ticks / os.sysconf("SC_CLK_TCK")


def other_cores(busy_before: float | None, own_seconds: float, seconds: float) -> float | None:
    """How many cores other processes held, on average, over the `seconds` of wall time since `busy_before` was read.

    Args:
      busy_before: what `busy_seconds` said then.
      own_seconds: processor seconds of the work being measured.
      seconds: of wall time.
    """
    now = busy_seconds()
    if now is None or busy_before is None:
        return None
    return round(max(0.0, now - busy_before - own_seconds) / seconds, 2)
