"""A plan held against the compiler: the real step of the real model, compiled for the devices of the plan.

Shapes only: no weight exists and no device runs. On fake CPU devices the compiler computes products of 16-bit numbers in float32
and sends them so, which `predict_memory` and `predict_collectives` know; its temporaries stand for another machine's only roughly.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ernie_jax.config.run import RunConfig
from ernie_jax.plan.comparison import Comparison
from ernie_jax.plan.compiled_step import request_of
from ernie_jax.plan.hlo import CollectiveUse, summed
from ernie_jax.plan.memory import predict_memory
from ernie_jax.plan.step_collectives import predict_collectives
from ernie_jax.plan.targets import check_target, environment, installed
from ernie_jax.plan.topology import GIB, Topology


@dataclass(frozen=True)
class Proof:
    """What compiling showed.

    Attributes:
      target: "cpu" (fake devices), "tpu" or "gpu".
      devices: of the mesh.
      seconds: to lower and compile.
      host_bytes: that the compiling process held at most.
      bytes: of a device, by the compiler.
      memory_bytes: that a device has.
      memory: bytes by kind: argument, temp, output, alias.
      rows: the comparison, memory first, then collectives by bytes.
      collectives: of the compiled program, of the stage that communicates most.
    """

    target: str
    devices: int
    seconds: float
    host_bytes: int
    bytes: int
    memory_bytes: int
    memory: dict[str, int]
    rows: tuple[Comparison, ...]
    collectives: tuple[CollectiveUse, ...]

    @property
    def fits(self) -> bool:
        """Whether the compiled step fits a device."""
        return self.bytes <= self.memory_bytes

    @property
    def sentence(self) -> str:
        """What it came to, in a line."""
        room = f"{'fits' if self.fits else 'does not fit'} {self.memory_bytes / GIB:.1f} GiB"
        figures = ", ".join(f"{row.name} {row.predicted / row.compiled - 1:+.1%}" for row in self.rows[:2] if row.compiled)
        return (
            f"{self.target}: {self.bytes / GIB:.2f} GiB a device, {room}; predicted against compiled: {figures}; compiled in "
            f"{self.seconds:.0f} s with {self.host_bytes / GIB:.1f} GiB of this machine's memory"
        )

    def to_json(self) -> dict[str, Any]:
        """As JSON has it, memory in GiB."""
        return {
            "target": self.target,
            "devices": self.devices,
            "seconds": self.seconds,
            "host_gib": self.host_bytes / GIB,
            "memory_gib": self.bytes / GIB,
            "fits": self.fits,
            "memory": {kind: size / GIB for kind, size in self.memory.items()},
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "collectives": [{"kind": u.kind, "axis": u.axis, "bytes": u.bytes, "count": u.count} for u in self.collectives],
        }


@dataclass(frozen=True)
class Proofs:
    """Of one plan for several targets: what `Plan.compiled` holds."""

    proofs: tuple[Proof, ...]

    @property
    def rows(self) -> tuple[Comparison, ...]:
        """All comparisons, each with its target in the name."""
        return tuple(dataclasses.replace(row, name=f"{row.name} ({proof.target})") for proof in self.proofs for row in proof.rows)

    def to_json(self) -> list[dict[str, Any]]:
        """One object a target."""
        return [proof.to_json() for proof in self.proofs]


def targets_of(topology: Topology) -> list[str]:
    """What a plan can be compiled for here: fake CPU devices, and the topology's own platform where its compiler is installed."""
    own = [] if topology.platform == "cpu" or not installed(topology.platform) else [topology.platform]
    return ["cpu", *own]


def prove(run: RunConfig, topology: Topology, target: str = "cpu") -> Proof:
    """Compile a run's step for a topology, in a process of its own, and compare with what is predicted.

    Raises:
      ValueError: a target that is not installed, or sizes that a real run would refuse.
      RuntimeError: the compiler failed or ended the process, with its last words.
    """
    check_target(target, topology)
    found = _compile(run, topology, target)
    stages = [[CollectiveUse(**use) for use in stage] for stage in found["collectives"]]
    busiest = max(range(len(stages)), key=lambda stage: sum(use.bytes for use in stages[stage]))
    predicted = predict_memory(run, target).bytes
    rows = [Comparison("memory of a device", predicted / GIB, found["bytes"] / GIB, "GiB")]
    rows += _collective_rows(summed(predict_collectives(run, target, busiest)), stages[busiest])
    return Proof(
        target=target,
        devices=topology.devices,
        seconds=sum(found["seconds"].values()),
        host_bytes=found["host_bytes"],
        bytes=found["bytes"],
        memory_bytes=topology.memory_bytes,
        memory=found["memory"],
        rows=tuple(rows),
        collectives=tuple(stages[busiest]),
    )


def _collective_rows(predicted: Sequence[CollectiveUse], compiled: Sequence[CollectiveUse]) -> list[Comparison]:
    """A row for all together, and one for each kind and axis with a hundredth of the bytes or more."""
    tables: list[dict[str, float]] = []
    for uses in (predicted, compiled):
        table: dict[str, float] = {}
        for use in uses:
            name = f"{use.kind} over {use.axis}"
            table[name] = table.get(name, 0.0) + use.bytes
        tables.append(table)
    ours, theirs = tables
    total = sum(theirs.values())
    names = sorted({*ours, *theirs}, key=lambda name: -max(ours.get(name, 0.0), theirs.get(name, 0.0)))
    rows = [Comparison("all collectives", sum(ours.values()), total, "bytes")]
    for name in names:
        pair = ours.get(name, 0.0), theirs.get(name, 0.0)
        if max(pair) >= 0.01 * total:
            rows.append(Comparison(name, *pair, "bytes"))
    return rows


def _compile(run: RunConfig, topology: Topology, target: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        request, result = Path(folder) / "request.json", Path(folder) / "result.json"
        request.write_text(json.dumps(request_of(run, topology, target)))
        command = [sys.executable, "-m", "ernie_jax.plan.compiled_step", str(request), str(result)]
        ended = subprocess.run(
            command, env={**os.environ, **environment(target, topology.devices)}, capture_output=True, text=True, check=False
        )
        if not result.exists():
            raise RuntimeError(
                f"compiling for {topology.devices} {target} devices ended with status {ended.returncode}: "
                f"{ended.stderr.strip()[-2000:]}"
            )
        found: dict[str, Any] = json.loads(result.read_text())
    if "error" in found:
        raise ValueError(found["error"])
    return found
