"""Training step: tokens/s, MFU and peak memory; against transformers, or on fake-device meshes. B batch, T tokens.

Every side trains on the same batch from the same weights; their losses before the first two steps must agree.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from benches.collective_profile import collective_table, profile_collectives
from benches.comparison import (
    MACHINE,
    OURS,
    RIVAL,
    Measured,
    Results,
    SideSpec,
    add_comparison_arguments,
    check_comparison,
    conclusion,
    figures,
    machine,
    measure,
    memory_fields,
    options_of,
    speed_table,
)
from benches.fake_devices import fake_devices
from benches.model import add_model_arguments, check_at_least, random_tokens, run_config, train_flops
from benches.provenance import provenance
from benches.rival import ENVIRONMENT
from ernie_jax.checkpoint import save_pretrained
from ernie_jax.config.pipeline import PIPELINE_SCHEDULES, PipelineConfig
from ernie_jax.config.run import RunConfig
from ernie_jax.models import batch_shardings
from ernie_jax.parallel.pipeline import StagePlan
from ernie_jax.sharding import one_device_mesh
from ernie_jax.train.state import init_state, mesh_of, run_layout
from ernie_jax.train.step import make_train_step, model_of

BATCH, MESH_BATCH = (4, 512), (8, 256)
MESH_AXES = ("data", "expert", "tensor", "pipeline")
# Largest relative difference of the first losses, and of what one update changes them by.
TOLERANCE = {"float32": (1e-4, 0.02), "bfloat16": (5e-3, 0.2)}


def load() -> None:
    """Starts the backend."""
    jax.devices()


class Step:
    """Our side: `options["run"]`, its `tokens` [B, T], a `folder` for an export of the first weights, or None, and how many
    `profiled` steps to read the shares of collectives from at the end, 0 where it is left out."""

    parts: Sequence[str] = ("step",)

    def __init__(self, options: Mapping[str, Any]) -> None:
        run: RunConfig = options["run"]
        mesh = one_device_mesh() if math.prod(run.mesh.sizes.values()) == 1 else mesh_of(run)
        layout = run_layout(run, mesh)
        self._step = make_train_step(run, layout)
        self._state = init_state(run, layout)
        self._batch = jax.device_put(training_batch(options["tokens"]), batch_shardings(layout, multimodal=False))
        if options["folder"] is not None:
            save_pretrained(model_of(run, layout, self._state), options["folder"])
        self._profiled: int = options.get("profiled", 0)
        if self._profiled:
            # The text of a program has the names of the instructions that a profile of it has.
            compiled = self._step.lower(self._state, self._batch).compile()
            self._step, self._hlo = compiled, compiled.as_text()
        leaves = jax.tree.leaves(self._state.params)
        self.facts: dict[str, Any] = {
            "devices": mesh.size,
            "parameters": sum(x.size for x in leaves),
            "dtype": run.computed_in,
        }

    def run(self, part: str) -> float:
        """One optimiser step; returns the cross-entropy a token before it."""
        self._state, metrics = self._step(self._state, self._batch)
        jax.block_until_ready(self._state)
        return float(metrics["loss"])

    def final(self) -> dict[str, Any]:
        """The profile, where one was asked for."""
        if not self._profiled:
            return {}
        return profile_collectives(lambda: self.run("step"), self._hlo, devices=self.facts["devices"], steps=self._profiled)


def training_batch(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """One document a row [B, T]; the last token of a row predicts nothing."""
    rows, length = tokens.shape
    labels = np.concatenate([tokens[:, 1:], np.full((rows, 1), -1, np.int32)], axis=1)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    return {"input_ids": tokens, "labels": labels, "segment_ids": np.ones_like(tokens), "position_ids": positions}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `bench.py train`."""
    add_model_arguments(parser)
    rows, tokens = (f"{what} (default: {a}, or {b} for meshes that {a} rows do not split over)" for what, a, b in _DEFAULTS)
    parser.add_argument("--batch-size", type=int, default=argparse.SUPPRESS, help=rows)
    parser.add_argument("--tokens", type=int, default=argparse.SUPPRESS, help=tokens)
    add_comparison_arguments(parser, repeats=7)
    parser.add_argument(
        "--mesh", action="append", help="axis=size,...: also the same step on a mesh of that many fake CPU devices; may be repeated"
    )
    parser.add_argument("--zero", type=int, choices=(0, 1, 3), default=0, help="of meshes: what ZeRO shards over data")
    parser.add_argument("--schedule", choices=PIPELINE_SCHEDULES, default="1f1b", help="of meshes with pipeline=")
    parser.add_argument("--microbatches", type=int, help="of meshes with pipeline= (default: one a stage)")
    parser.add_argument("--virtual-stages", type=int, default=1, help="of meshes with pipeline=; 2 or more for interleaved")
    parser.add_argument("--profile-steps", type=int, default=2, help="steps of each mesh to read the shares of collectives from")


def run(args: argparse.Namespace) -> dict[str, object]:
    """Measures, prints the table and returns the result.

    Raises:
      ValueError: sizes that do not fit, a mesh that is not one, a comparison with what is not installed.
      RuntimeError: losses that differ.
    """
    meshes = {text: parse_mesh(text) for text in args.mesh or ()}
    batch_size, tokens = _batch_shape(args, meshes)
    check_at_least({**vars(args), "batch_size": batch_size, "tokens": tokens}, batch_size=1, tokens=2, repeats=1, profile_steps=0)
    if args.zero and not meshes:
        raise ValueError(f"--zero {args.zero} shards over the data axis of a mesh; give one with --mesh")
    if meshes and args.against is not None:
        raise ValueError("--mesh and --against are two comparisons; give one of them")
    check_comparison(args)
    runs = {text: _mesh_run(args, batch_size, tokens, mesh) for text, mesh in meshes.items()}
    single = run_config(vars(args), batch_size=batch_size, tokens=tokens)
    ids = random_tokens(vars(args), batch_size, tokens)
    console = Console()
    others = [args.against] if args.against else [f"{mesh} on fake devices" for mesh in meshes]
    against = f", against {' and '.join(others)}" if others else ""
    console.print(
        f"training step of {batch_size} x {tokens} tokens, {args.dtype}, on one device{against}: "
        f"at most {args.repeats} rounds{' each' if len(others) > 1 else ''}"
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "export" if args.against else None
        fake = bool(meshes)
        alone = {
            MACHINE: machine(args, cpu=fake),
            OURS: SideSpec("benches.train:Step", {"run": single, "tokens": ids, "folder": folder}, fake_devices(1, cpu=fake)),
        }
        comparisons: list[dict[str, SideSpec]] = [{}]
        if args.against:
            options = {"folder": folder, "tokens": ids, "optimizer": asdict(single.optimizer), "rate": single.schedule.peak}
            comparisons = [{RIVAL: SideSpec("benches.rival:Train", options, ENVIRONMENT)}]
        elif meshes:
            # One mesh after another: fake devices that replicate the state take memory for each.
            comparisons = [{text: _mesh_side(runs[text], ids, sizes, args.profile_steps)} for text, sizes in meshes.items()]
        measured = [measure(alone | other, args, console, lambda found: _check_losses(found, args.dtype)) for other in comparisons]
    flops = train_flops(single.model, batch_size, tokens)
    result = figures(measured[0], lambda r, side: r[side]["step"]["seconds"], batch_size * tokens, flops)
    losses = {name: values for part in measured for name, values in _losses(part.results).items()}
    table = {text: _mesh_fields(part, text, batch_size * tokens) for text, part in zip(meshes, measured, strict=False)}
    result |= {"bench": "train", "memory": memory_fields(measured[0]), "losses": losses, "meshes": table}
    # The worst mesh.
    result |= {name: max((m[name] for m in table.values()), default=None) for name in ("cpu_ratio", "wall_ratio")}
    gigabytes = {name: f"{net / 1e9:.2f} GB" for name in (OURS, RIVAL) if (net := result["memory"][name]) is not None}
    console.print(speed_table("training step", result, peak_memory=gigabytes))
    if meshes:
        console.print(_mesh_table(table))
        if args.profile_steps:
            console.print(collective_table({name: fields["collectives"] for name, fields in table.items()}))
    console.print(f"one-device MFU {result['mfu']:.1%}; {conclusion(result)}")
    return {**result, "options": options_of(args) | {"batch_size": batch_size, "tokens": tokens}, **provenance()}


def parse_mesh(text: str) -> dict[str, int]:
    """`data=2,tensor=2` as axis sizes.

    Raises:
      ValueError: an axis that is not one or is named twice, a size below 1, a single device.
    """
    sizes: dict[str, int] = {}
    for item in text.split(","):
        axis, _, size = (part.strip() for part in item.partition("="))
        if axis not in MESH_AXES or axis in sizes or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"--mesh {text}: {item!r}; expected axis=size with each axis once, of {', '.join(MESH_AXES)}, as data=8"
            )
        sizes[axis] = int(size)
    if math.prod(sizes.values()) < 2:
        raise ValueError(f"--mesh {text} is one device, which is measured anyway; give a mesh of at least two")
    return sizes


_DEFAULTS = tuple(zip(("rows of the global batch", "tokens a row"), BATCH, MESH_BATCH, strict=True))


def _batch_shape(args: argparse.Namespace, meshes: Mapping[str, Mapping[str, int]]) -> tuple[int, int]:
    """Rows and tokens, by default such that every mesh splits the rows."""
    rows = {text: sizes.get("data", 1) * sizes.get("expert", 1) * _microbatches(args, sizes) for text, sizes in meshes.items()}
    given = (getattr(args, "batch_size", None), getattr(args, "tokens", None))
    default = MESH_BATCH if given == (None, None) and any(BATCH[0] % count for count in rows.values()) else BATCH
    batch_size, tokens = (chosen if chosen is not None else usual for chosen, usual in zip(given, default, strict=True))
    for text, count in rows.items():
        if batch_size % count:
            raise ValueError(
                f"--mesh {text} splits the batch by devices and microbatches into {count} parts, not so {batch_size} rows; "
                f"give --batch-size a multiple of {count}"
            )
    return batch_size, tokens


def _check_losses(results: Results, dtype: str) -> None:
    """Every side starts at our loss, and the first update changes it as ours does."""
    first, moved = TOLERANCE[dtype]
    losses = _losses(results)
    ours = losses.pop(OURS)
    for name, theirs in losses.items():
        change, expected = theirs[0] - theirs[1], ours[0] - ours[1]
        if not abs(theirs[0] - ours[0]) <= first * abs(ours[0]) or not abs(change - expected) <= moved * abs(expected):
            raise RuntimeError(
                f"{name} does not train the same model: its losses before the first two steps are {theirs[0]:.6f} and "
                f"{theirs[1]:.6f}, ours {ours[0]:.6f} and {ours[1]:.6f}; a bench of different computations is void"
            )


def _losses(results: Results) -> dict[str, list[float]]:
    return {name: parts["step"] for name, parts in results.items() if "step" in parts}


def _microbatches(args: argparse.Namespace, sizes: Mapping[str, int]) -> int:
    """Microbatches of a mesh: one for one without stages."""
    stages = sizes.get("pipeline", 1)
    return 1 if stages == 1 else args.microbatches or stages


def _mesh_run(args: argparse.Namespace, batch_size: int, tokens: int, sizes: Mapping[str, int]) -> RunConfig:
    """The run on a mesh, with the schedule that was asked for where it has stages.

    Raises:
      ValueError: a schedule and virtual stages that do not go together, more virtual stages than layers.
    """
    pipeline, stages = PipelineConfig(), sizes.get("pipeline", 1)
    if stages > 1:
        pipeline = PipelineConfig(schedule=args.schedule, microbatches=args.microbatches, virtual_stages=args.virtual_stages)
        StagePlan.spread(args.layers - 1, stages, args.virtual_stages)
    return run_config(vars(args), batch_size=batch_size, tokens=tokens, mesh={**sizes, "zero": args.zero}, pipeline=pipeline)


def _mesh_side(run: RunConfig, tokens: np.ndarray, sizes: Mapping[str, int], profiled: int) -> SideSpec:
    options = {"run": run, "tokens": tokens, "folder": None, "profiled": profiled}
    return SideSpec("benches.train:Step", options, fake_devices(math.prod(sizes.values()), cpu=True))


def _mesh_fields(measured: Measured, name: str, tokens: int) -> dict[str, Any]:
    """Wall and processor time on a mesh, and both over those of the one-device step in the same round, medians; the profile."""
    facts = measured.facts[name]
    found = {key: facts[key] for key in ("devices", "collectives", "profiled_seconds") if key in facts}
    for what, ratio in (("seconds", "wall_ratio"), ("cpu_seconds", "cpu_ratio")):
        here = [r[name]["step"][what] for r in measured.rounds]
        alone = [r[OURS]["step"][what] for r in measured.rounds]
        found[what] = statistics.median(here)
        found[f"one_device_{what}"] = statistics.median(alone)
        found[ratio] = round(statistics.median(a / b for a, b in zip(here, alone, strict=True)), 3)
    return found | {"tokens_per_s": tokens / found["seconds"]}


def _mesh_table(meshes: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(title="the same step on fake devices")
    for heading in ("mesh", "tokens/s", "wall, ms", "ratio", "processor, ms", "ratio"):
        table.add_column(heading, justify="left" if heading == "mesh" else "right")
    for name, m in meshes.items():
        wall, cpu = f"{m['seconds'] * 1e3:.1f}", f"{m['cpu_seconds'] * 1e3:.1f}"
        table.add_row(
            name.replace(",", " "), f"{m['tokens_per_s']:,.0f}", wall, f"{m['wall_ratio']:.2f}", cpu, f"{m['cpu_ratio']:.2f}"
        )
    return table
