"""FP8 against bfloat16: the loss after some quickstart steps from the same weights and data, and the memory of the compiled step.

Loss: the recipe `configs/quickstart.py`, data parallel over the devices there are, both precisions of a seed one after the other.
Memory: the temporary bytes of its step compiled for one device, and what keeping the experts' `expert_gate_up` adds to a step that
keeps nothing. The exact ratio is 0.516 (`tests/moe/test_fp8_memory.py`): XLA:CPU holds a widened copy of what bfloat16 keeps
besides, so that there FP8 looks better than it is.
"""

from __future__ import annotations

import argparse
import runpy
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from benches.comparison import options_of
from benches.provenance import provenance
from ernie_jax.config import run_config_from
from ernie_jax.config.run import MeshConfig, RunConfig
from ernie_jax.models import batch_shardings
from ernie_jax.sharding import one_device_mesh
from ernie_jax.train import train
from ernie_jax.train.records import read_records
from ernie_jax.train.state import abstract_state, run_layout
from ernie_jax.train.step import make_train_step

REFERENCE, TESTED = "bfloat16", "fp8"
REMATS: dict[str, str | tuple[str, ...]] = {"full": "full", "expert_gate_up": ("expert_gate_up",), "none": "none"}
RECIPE = Path(__file__).parents[2] / "configs" / "quickstart.py"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `bench.py precision`."""
    parser.add_argument("--steps", type=int, default=300, help="optimiser steps of a run; the schedule scales with them")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each precision, seeds 0, 1, ...")
    parser.add_argument("--last", type=int, default=20, help="mean training loss over the logged ones of so many last steps")
    parser.add_argument("--gradient-format", choices=("e4m3", "e5m2"), default="e4m3", help="of the gradients in FP8 products")
    parser.add_argument("--weight-gradient", action="store_true", help="multiply for the weights' gradient in FP8 too")


def run(args: argparse.Namespace) -> dict[str, object]:
    """Trains, compiles, prints the tables and returns the result.

    Raises:
      ValueError: counts below 1.
    """
    for name in ("steps", "seeds", "last"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}")
    console = Console()
    console.print(
        f"{args.steps} steps of {RECIPE.name}, {TESTED} against {REFERENCE}, seeds 0 to {args.seeds - 1}; "
        "then the memory of the compiled step"
    )
    both = (REFERENCE, TESTED)
    losses = [{precision: _losses(args, precision, seed) for precision in both} for seed in range(args.seeds)]
    differences = {
        kind: [pair[TESTED][kind] / pair[REFERENCE][kind] - 1 for pair in losses] for kind in ("train_loss", "eval_loss")
    }
    memory = {precision: _memory(_run(args, precision, 0)) for precision in (REFERENCE, TESTED)}
    worst = max(abs(d) for each in differences.values() for d in each)
    kept = {precision: sizes["expert_gate_up"] - sizes["full"] for precision, sizes in memory.items()}
    console.print(_loss_table(losses, differences))
    console.print(_memory_table(memory, kept))
    ratio = kept[TESTED] / kept[REFERENCE]
    console.print(f"loss differs by at most {worst:.2%}; what the experts keep is {ratio:.2f} of {REFERENCE}'s")
    return {
        "bench": "precision",
        "losses": losses,
        "differences": differences,
        "worst_difference": worst,
        "temp_bytes": memory,
        "kept_ratio": ratio,
        "options": options_of(args),
        **provenance(),
    }


def _run(args: argparse.Namespace, precision: str, seed: int) -> RunConfig:
    config = runpy.run_path(str(RECIPE))["get_config"]()
    config.update({"steps": args.steps, "seed": seed, "precision": precision, "log_every": max(1, args.steps // 60)})
    config.fp8.update({"gradient_format": args.gradient_format, "weight_gradient": args.weight_gradient})
    config.checkpoint.every = config.eval.every = 0
    config.sample.prompt = ""
    return replace(run_config_from(config), mesh=MeshConfig(data=-1))


def _losses(args: argparse.Namespace, precision: str, seed: int) -> dict[str, float]:
    """Mean training loss of the last steps, held-out loss after them, and steps that were skipped."""
    with tempfile.TemporaryDirectory() as folder:
        result = train(_run(args, precision, seed), Path(folder), say=lambda line: None)
        records = read_records(Path(folder) / "metrics.jsonl")
    assert result.eval_loss is not None
    last = statistics.fmean(record["loss"] for record in records if record["step"] > args.steps - args.last)
    return {"train_loss": last, "eval_loss": result.eval_loss, "skipped_steps": result.skipped_steps}


def _memory(run: RunConfig) -> dict[str, int]:
    """Temporary bytes of the compiled step with each remat policy."""
    layout = run_layout(run, one_device_mesh())
    shape = (run.batch_size, run.seq_len)
    batch = {key: jax.ShapeDtypeStruct(shape, jnp.int32) for key in batch_shardings(layout, multimodal=False)}
    sizes = {}
    for name, remat in REMATS.items():
        one = replace(run, remat=remat)
        compiled = make_train_step(one, layout).lower(abstract_state(one, layout), batch).compile()
        sizes[name] = compiled.memory_analysis().temp_size_in_bytes
    return sizes


def _loss_table(losses: list[dict[str, dict[str, float]]], differences: dict[str, list[float]]) -> Table:
    columns = [f"{precision} {kind}" for kind in ("train", "held-out") for precision in (REFERENCE, TESTED)]
    table = Table("seed", *columns, "differences")
    for seed, pair in enumerate(losses):
        cells = [f"{pair[precision][kind]:.4f}" for kind in differences for precision in (REFERENCE, TESTED)]
        table.add_row(str(seed), *cells, ", ".join(f"{each[seed]:+.2%}" for each in differences.values()))
    return table


def _memory_table(memory: dict[str, dict[str, int]], kept: dict[str, int]) -> Table:
    table = Table("temporary bytes of the step", *memory)
    for name in REMATS:
        table.add_row(f"remat {name}", *(f"{sizes[name] / 1e6:.1f} MB" for sizes in memory.values()))
    table.add_row("kept by the experts", *(f"{size / 1e6:.1f} MB" for size in kept.values()))
    return table
