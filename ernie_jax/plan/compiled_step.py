"""Compiles the training step of a run for a target, in a process of its own: what devices there are is settled as JAX starts.

python -m ernie_jax.plan.compiled_step REQUEST RESULT reads a run, a topology and a target from one JSON file and writes what came
of it to another. `proof.prove` is the way to call it.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ernie_jax.config import run_config_from
from ernie_jax.config.run import RunConfig
from ernie_jax.native import switched_off
from ernie_jax.plan.hlo import program_collectives, summed
from ernie_jax.plan.pipeline_shares import pipeline_shares
from ernie_jax.plan.targets import target_devices
from ernie_jax.plan.topology import Link, Topology
from ernie_jax.sharding import make_mesh
from ernie_jax.train.abstract_batch import abstract_batch
from ernie_jax.train.remat_choice import step_bytes
from ernie_jax.train.state import abstract_state, run_layout
from ernie_jax.train.step import make_train_step

_MEMORY = ("argument", "temp", "output", "alias")


def request_of(run: RunConfig, topology: Topology, target: str) -> dict[str, Any]:
    """What the process is to compile, as JSON has it."""
    return {"run": run.to_dict(), "topology": dataclasses.asdict(topology), "target": target}


def compile_for(run: RunConfig, topology: Topology, target: str) -> dict[str, Any]:
    """Lower and compile a run's step, shapes only, and report on the program.

    Returns:
      `seconds` to lower and to compile, `host_bytes` of this process at most, `memory` of a device by kind and `bytes` in all, and
      `collectives` for each pipeline stage: kind, axis, dtype, bytes, count.

    Raises:
      ValueError: what a real run would raise for these sizes; a target that has no such machine.
    """
    start = time.perf_counter()
    layout = run_layout(run, make_mesh(**run.mesh.sizes, devices=target_devices(target, topology)))
    with switched_off():
        lowered = make_train_step(run, layout).lower(abstract_state(run, layout), abstract_batch(run, layout))  # type: ignore[attr-defined]
    between = time.perf_counter()
    compiled = lowered.compile()
    end = time.perf_counter()
    analysis = compiled.memory_analysis()
    memory = {kind: int(getattr(analysis, f"{kind}_size_in_bytes")) for kind in _MEMORY}
    # The CPU compiler's peak is its arguments alone.
    peak = int(getattr(analysis, "peak_memory_in_bytes", 0)) if target != "cpu" else 0
    hlo, sizes = compiled.as_text(), run.mesh.sizes
    stages = [
        [dataclasses.asdict(use) for use in summed(program_collectives(hlo, sizes, shares=pipeline_shares(run, stage)))]
        for stage in range(run.mesh.pipeline)
    ]
    return {
        "seconds": {"lower": between - start, "compile": end - between},
        "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "memory": memory,
        "bytes": peak or step_bytes(compiled),
        "collectives": stages,
    }


def main(request: Path, result: Path) -> int:
    """Compile what `request` holds; 2 for a mistake in it, told in `result`."""
    given = json.loads(request.read_text())
    try:
        found = compile_for(run_config_from(given["run"]), _topology(given["topology"]), given["target"])
    except ValueError as error:
        result.write_text(json.dumps({"error": str(error)}))
        return 2
    result.write_text(json.dumps(found))
    return 0


def _topology(values: Mapping[str, Any]) -> Topology:
    links = {level: Link(**values[level]) for level in ("intra", "inter")}
    return Topology(**{**values, **links})


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
