"""What each remat policy keeps and computes again: bytes and FLOPs of the compiled step, beside the prediction from shapes.

For a text model and a tiny vision-language model. Nothing is run and no weights are made. Bytes of a layer are the difference of
two depths, so that what is alike in all steps (weights, moments, the loss) falls out, and are counted beyond those of `full`,
which keeps the layer's input alone. FLOPs are of the traced program, loops by their rounds (`train/program_flops.py`); with
stages, a tick that idles counts as one that works.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benches.fake_devices import FLAG
from benches.model import add_model_arguments, check_at_least, run_config
from benches.provenance import provenance
from benches.train import parse_mesh
from ernie_jax.config.remat import Remat, remat_plan
from ernie_jax.config.run import DataConfig, MeshConfig, RunConfig
from ernie_jax.sharding import make_mesh, one_device_mesh
from ernie_jax.testing import tiny_vl
from ernie_jax.train.remat_choice import KEEP_TAGS, compile_step, policy_name, step_bytes, step_flops, with_remat
from ernie_jax.train.remat_prediction import StepShape, block_bytes, extra_flops, unit_bytes
from ernie_jax.train.state import run_layout

MODELS = ("text", "vl")
# `tags` keeps the tensors of all tags: what the other policies are exceptions from.
DEFAULT = {
    "text": ("none", "tags", "experts", "attention", "full"),
    "vl": ("none", "tags", "vision", "experts", "attention", "full"),
}
# Of the tiny vision-language model: rows, tokens of a row, patches of a device.
VL_BATCH, VL_PATCHES = (8, 64), 256
_MORE = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `bench.py remat`."""
    add_model_arguments(parser)
    parser.add_argument("--batch-size", type=int, default=4, help="rows of the text model")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a row of the text model")
    parser.add_argument("--mesh", default=None, help="axis=size,... of fake CPU devices instead of one device")
    parser.add_argument("--model", choices=MODELS, action="append", default=None, help="which; may be repeated (default: both)")
    parser.add_argument("--policy", action="append", default=None, help="which, or `tags`; may be repeated (default: all of them)")


def run(args: argparse.Namespace) -> dict[str, object]:
    """Compiles, prints a table for each model and returns the result.

    Raises:
      ValueError: sizes that do not fit, an unknown policy, a mesh that is not one.
    """
    # A loop of one round is none to the compiler, which then lays out its tensors in another way than in all others.
    check_at_least(vars(args), batch_size=1, tokens=2, layers=3)
    mesh, models = {} if args.mesh is None else parse_mesh(args.mesh), args.model or MODELS
    policies = {model: [_policy(p) for p in args.policy or DEFAULT[model]] for model in models}
    runs = {model: _run(model, args, mesh) for model in models}
    count = _devices(mesh)
    if jax.device_count() < count:
        return _again(count)
    console = Console()
    where = args.mesh or "one device"
    console.print(f"training step compiled under each policy, {where}, {args.dtype}; temporaries are only indicative on CPU")
    tables = {}
    for model in models:
        wanted = policies[model] if "full" in policies[model] else [*policies[model], "full"]
        shown = track(wanted, description=model, console=console, transient=True) if console.is_terminal else wanted
        tables[model] = _compared([_measured(runs[model], policy, mesh) for policy in shown])
        console.print(_table(model, tables[model]))
    return {
        "bench": "remat",
        "models": tables,
        "options": {k: v for k, v in vars(args).items() if k not in ("name", "json")},
        **provenance(),
    }


def _policy(name: str) -> Remat:
    policy = KEEP_TAGS if name == "tags" else name
    if remat_plan(policy).offloaded:
        raise ValueError(f"--policy {name}: offloading is not for CPU devices, where it moves nothing")
    return policy


def _run(model: str, args: argparse.Namespace, mesh: Mapping[str, int]) -> RunConfig:
    if model == "text":
        return run_config(vars(args), batch_size=args.batch_size, tokens=args.tokens, mesh=mesh)
    config = tiny_vl(num_hidden_layers=4, hidden_size=64, num_key_value_heads=4)
    config = replace(config, vision=replace(config.vision, depth=3, hidden_size=64, intermediate_size=128))
    data = DataConfig(kind="multimodal", paths=("none are read",), tokenizer="none is read", max_patches=VL_PATCHES)
    rows, tokens = VL_BATCH
    return RunConfig(model=config, steps=1, batch_size=rows, seq_len=tokens, dtype=args.dtype, mesh=MeshConfig(**mesh), data=data)


def _devices(mesh: Mapping[str, int]) -> int:
    return math.prod(mesh.values())


def _again(count: int) -> dict[str, object]:
    """The same command where JAX sees enough devices; its output is this command's."""
    flags = " ".join([*(f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(FLAG)), f"{FLAG}={count}"])
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode)


def _measured(run: RunConfig, policy: Remat, mesh: Mapping[str, int]) -> dict[str, Any]:
    run = with_remat(run, policy)
    model = run.model
    where = make_mesh(**mesh, devices=jax.devices()[: _devices(mesh)]) if mesh else one_device_mesh()

    def size(run: RunConfig) -> int:
        return step_bytes(compile_step(run, run_layout(run, where)))

    layout = run_layout(run, where)
    shape, whole = StepShape.of(run, layout), size(run)
    # As many more in each stage.
    layers = replace(model, num_hidden_layers=model.num_hidden_layers + _MORE * mesh.get("pipeline", 1))
    row = {
        "policy": policy_name(policy),
        "bytes": whole,
        "layer_bytes": (size(replace(run, model=layers)) - whole) / _MORE,
        "predicted_layer_bytes": unit_bytes(model, shape, policy, ("moe",)),
        "flops": step_flops(run, layout),
        "predicted_extra_flops": extra_flops(run, shape, policy),
    }
    if model.vision is not None:
        blocks = replace(model, vision=replace(model.vision, depth=model.vision.depth + _MORE))
        row["block_bytes"] = (size(replace(run, model=blocks)) - whole) / _MORE
        row["predicted_block_bytes"] = block_bytes(model, shape, policy)
    return row


def _compared(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with what is kept beyond `full`, saved against the first row, and computed beyond the least."""
    full = next(row for row in rows if row["policy"] == "full")
    least = min(row["flops"] for row in rows)
    compared = []
    for row in rows:
        new = {**row, "saved_bytes": rows[0]["bytes"] - row["bytes"], "extra_flops": row["flops"] - least}
        for part in ("layer", "block"):
            if f"{part}_bytes" in row:
                predicted = row[f"predicted_{part}_bytes"]
                new[f"{part}_bytes"] = row[f"{part}_bytes"] - full[f"{part}_bytes"]
                new[f"predicted_{part}_bytes"] = None if predicted is None else predicted - full[f"predicted_{part}_bytes"]
        compared.append(new)
    return compared


def _table(model: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    parts = ["layer"] + ["block"] * ("block_bytes" in rows[0])
    table = Table(title=f"remat, {model}: MB of one device, GFLOP of all, a step")
    headings = ["policy", "step, MB", f"saved against {rows[0]['policy']}"]
    for part in parts:
        headings += [f"kept a {'MoE layer' if part == 'layer' else 'vision block'} beyond full", "predicted"]
    for heading in (*headings, "FLOPs beyond the least", "predicted", "share"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for row in rows:
        cells = [row["policy"], _mega(row["bytes"]), _mega(row["saved_bytes"])]
        for part in parts:
            cells += [_mega(row[f"{part}_bytes"]), _mega(row[f"predicted_{part}_bytes"])]
        extra = row["extra_flops"]
        share = f"{extra / (row['flops'] - extra):.1%}"
        table.add_row(*cells, f"{extra / 1e9:.4g}", f"{row['predicted_extra_flops'] / 1e9:.4g}", share)
    return table


def _mega(size: float | None) -> str:
    return "as none" if size is None else f"{size / 1e6:.3f}"
