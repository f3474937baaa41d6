"""Which share of a step its devices spend in each kind of collective, from a profile.

A profile names each instruction of the compiled program that a device runs and says for how long; the program's text says which
instructions are collectives. On CPU a device is in a collective from when it gets there until it leaves it, so waiting for
slower devices is part of the share, as is waiting for a core where there are fewer cores than devices.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData, ProfileOptions
from rich.table import Table

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = .*? (?:ragged-)?(?P<kind>" + "|".join(KINDS) + r")(?:-start|-done)?\(", re.MULTILINE
)


def collective_instructions(hlo: str) -> dict[str, str]:
    """Names of the collectives in optimised HLO text (`compiled.as_text()`), each with its kind, one of `KINDS`."""
    return {match["name"]: match["kind"] for match in _INSTRUCTION.finditer(hlo)}


def profile_collectives(step: Callable[[], object], hlo: str, *, devices: int, steps: int) -> dict[str, Any]:
    """Traces some steps and reads the trace back.

    Args:
      step: does one step and waits for it.
      hlo: optimised text of the program that it runs.
      devices: that run it.
      steps: how many.

    Returns:
      `collectives`: kind -> time in it, summed over devices, divided by devices x time of the steps; `profiled_seconds` of a step,
      which tracing makes slower.
    """
    options = ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            start = time.perf_counter()
            for _ in range(steps):
                step()
            seconds = time.perf_counter() - start
        spent = collective_seconds(Path(folder), collective_instructions(hlo))
    shares = {kind: round(spent.get(kind, 0.0) / (devices * seconds), 4) for kind in KINDS}
    return {"collectives": shares, "profiled_seconds": seconds / steps}


def collective_seconds(folder: Path, kinds: Mapping[str, str]) -> dict[str, float]:
    """Kind -> seconds in it of all devices in the traces below a folder.

    Args:
      folder: where `jax.profiler.trace` wrote.
      kinds: instruction -> kind.

    Raises:
      RuntimeError: no trace there.
    """
    traces = sorted(folder.rglob("*.xplane.pb"))
    if not traces:
        raise RuntimeError(f"the profiler wrote no *.xplane.pb into {folder}")
    found = dict.fromkeys(kinds.values(), 0.0)
    for trace in traces:
        for plane in ProfileData.from_file(str(trace)).planes:
            for line in plane.lines:
                for event in line.events:
                    kind = kinds.get(event.name)
                    if kind is not None:
                        found[kind] += event.duration_ns * 1e-9
    return found


def collective_table(shares: Mapping[str, Mapping[str, float]]) -> Table:
    """One row a mesh: the share of a step in each kind and in all."""
    table = Table(
        title="share of the step in collectives, mean over devices",
        caption="from a profile; waiting for other devices is part of it",
    )
    for heading in ("mesh", *KINDS, "all"):
        table.add_column(heading.replace("-", " "), justify="left" if heading == "mesh" else "right", overflow="fold")
    for name, share in shares.items():
        table.add_row(name.replace(",", " "), *(f"{share[kind]:.1%}" for kind in KINDS), f"{sum(share.values()):.1%}")
    return table
