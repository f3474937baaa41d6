"""FP8 against bfloat16: the loss after some quickstart steps from the same weights and data, and the memory of the compiled step.

Loss: the recipe `configs/quickstart.py`, data parallel over the devices there are, both precisions of a seed one after the other.
Memory: the temporary bytes of its step compiled for one device, and what keeping the experts' `expert_gate_up` adds to a step that
keeps nothing. The exact ratio is 0.516 (`tests/moe/test_fp8_memory.py`): XLA:CPU holds a widened copy of what bfloat16 keeps
besides, so that there FP8 looks better than it is.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from benches.comparison import options_of
from benches.provenance import provenance
from benches.quickstart_run import RECIPE, add_run_arguments, check_counts, final_losses, quickstart_run
from ernie_jax.config.run import MeshConfig, RunConfig
from ernie_jax.models import batch_shardings
from ernie_jax.native import switched_off
from ernie_jax.sharding import one_device_mesh
from ernie_jax.train.state import abstract_state, run_layout
from ernie_jax.train.step import make_train_step

REFERENCE, TESTED = "bfloat16", "fp8"
REMATS: dict[str, str | tuple[str, ...]] = {"full": "full", "expert_gate_up": ("expert_gate_up",), "none": "none"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `bench.py precision`."""
    add_run_arguments(parser, seeds=3)
    parser.add_argument("--gradient-format", choices=("e4m3", "e5m2"), default="e4m3", help="of the gradients in FP8 products")
    parser.add_argument("--weight-gradient", action="store_true", help="multiply for the weights' gradient in FP8 too")


def run(args: argparse.Namespace) -> dict[str, object]:
    """Trains, compiles, prints the tables and returns the result.

    Raises:
      ValueError: counts below 1.
    """
    check_counts(args)
    console = Console()
    console.print(
        f"{args.steps} steps of {RECIPE.name}, {TESTED} against {REFERENCE}, seeds 0 to {args.seeds - 1}; "
        "then the memory of the compiled step"
    )
    both = (REFERENCE, TESTED)
    losses = [{precision: final_losses(_run(args, precision, seed), args.last) for precision in both} for seed in range(args.seeds)]
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
    fp8 = {"gradient_format": args.gradient_format, "weight_gradient": args.weight_gradient}
    return quickstart_run({"precision": precision, "fp8": fp8}, steps=args.steps, seed=seed, mesh=MeshConfig(data=-1))


def _memory(run: RunConfig) -> dict[str, int]:
    """Temporary bytes of the compiled step with each remat policy."""
    layout = run_layout(run, one_device_mesh())
    shape = (run.batch_size, run.seq_len)
    batch = {key: jax.ShapeDtypeStruct(shape, jnp.int32) for key in batch_shardings(layout, multimodal=False)}
    sizes = {}
    for name, remat in REMATS.items():
        one = replace(run, remat=remat)
        # By the kernels that both formats have.
        with switched_off():
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
