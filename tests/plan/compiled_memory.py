"""What compiled training steps need of a device's memory, recorded in golden_memory.json.

    python tests/plan/compiled_memory.py [NAME ...]

compiles the steps of the file's runs, all or those named, for eight fake CPU devices, and writes the bytes of one. To add a run,
add an entry with its name and overrides (see `run_of` in compiled_collectives.py). A step takes half a minute or more, so tests
compile few of them and take the file for the rest.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # What a step needs is settled before machine code is made: so that need not be good.
    _FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    os.environ.setdefault("XLA_FLAGS", _FLAGS)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from ernie_jax.config.run import RunConfig
from ernie_jax.native import switched_off
from ernie_jax.train.remat_choice import compile_step, step_bytes
from ernie_jax.train.state import mesh_of, run_layout

_SPEC = importlib.util.spec_from_file_location("compiled_collectives", Path(__file__).with_name("compiled_collectives.py"))
assert _SPEC is not None and _SPEC.loader is not None
compiled_collectives = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(compiled_collectives)
run_of = compiled_collectives.run_of

GOLDEN = Path(__file__).with_name("golden_memory.json")


def measured(run: RunConfig) -> int:
    """Bytes of one device that a run's compiled step needs."""
    # A plan is for kernels that the compiler knows.
    with switched_off():
        return step_bytes(compile_step(run, run_layout(run, mesh_of(run))))


def entry_of(name: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """Of the file."""
    return {"name": name, "overrides": overrides, "jax": jax.__version__, "bytes": measured(run_of(overrides))}


def write(entry: dict[str, Any]) -> None:
    """Puts an entry in the place of that of the same name."""
    table = {known["name"]: known for known in json.loads(GOLDEN.read_text())} | {entry["name"]: entry}
    GOLDEN.write_text("[\n" + ",\n".join(json.dumps(table[name]) for name in sorted(table)) + "\n]\n")


def main(names: list[str]) -> None:
    """Compiles the runs of these names, or all, and writes their figures."""
    runs = {entry["name"]: entry["overrides"] for entry in json.loads(GOLDEN.read_text())}
    if unknown := set(names) - set(runs):
        raise SystemExit(f"no runs {sorted(unknown)} in {GOLDEN.name}; there are {sorted(runs)}")
    for name in names or sorted(runs):
        entry = entry_of(name, runs[name])
        write(entry)
        print(name, entry["bytes"], flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
