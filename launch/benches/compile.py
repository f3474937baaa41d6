"""Time to compile a training step of a deep model over that of a shallow one of the same layers, cold, in turns.

Layers of one kind are stacked and scanned, so depth should cost next to nothing. Nothing is run and no weights are made.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benches.interleaved import interleave, median_ratio
from benches.provenance import provenance
from ernie_jax.config.run import DataConfig, RunConfig
from ernie_jax.models import batch_shardings
from ernie_jax.sharding import one_device_mesh
from ernie_jax.testing import tiny_moe
from ernie_jax.train.state import abstract_state, run_layout
from ernie_jax.train.step import make_train_step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `bench.py compile`."""
    parser.add_argument("--layers", type=int, default=54, help="layers of the deep model, the first dense, the rest MoE")
    parser.add_argument("--base-layers", type=int, default=4, help="layers of the shallow model")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64, help="tokens a sequence")
    parser.add_argument("--remat", default="none", help="recomputation policy")
    parser.add_argument("--repeats", type=int, default=3, help="rounds; the figures are medians over them")


def run(args: argparse.Namespace) -> dict[str, object]:
    """Measures, prints the table and returns the result.

    Raises:
      ValueError: fewer than two layers (a dense one and a MoE one), or another size below 1.
    """
    _check(args)
    console = Console()
    deep, shallow = f"{args.layers} layers", f"{args.base_layers} layers"
    console.print(
        f"training step of {args.batch_size} x {args.tokens} tokens, {deep} against {shallow}, remat {args.remat}, on one "
        f"{jax.devices()[0].device_kind} device, persistent cache off, {args.repeats} rounds"
    )
    jax.config.update("jax_enable_compilation_cache", False)
    phases: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    calls = {
        name: functools.partial(_compile_step, _run_config(args, layers), phases[name])
        for name, layers in ((shallow, args.base_layers), (deep, args.layers))
    }
    # No warm-up: a cold compilation is what is measured, and what the very first one loads falls on one round of several.
    rounds: Iterable[dict[str, float]] = interleave(calls, args.repeats, warm_up=False)
    if console.is_terminal:
        rounds = track(rounds, total=args.repeats, description=f"{shallow} / {deep}", console=console, transient=True)
    rounds = list(rounds)
    ratio = round(median_ratio(rounds, deep, shallow), 3)
    seconds = {name: round(statistics.median(r[name] for r in rounds), 3) for name in calls}
    cpu_ratio = statistics.median(d[-1] / s[-1] for d, s in zip(phases[deep], phases[shallow], strict=True))
    parts = {name: [round(statistics.median(p), 3) for p in zip(*phases[name], strict=True)] for name in calls}
    table = Table(title="training step, cold")
    for heading in ("", "trace and lower, s", "compile, s", "in all, s", "ratio", "processor time, s", "ratio"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, (lower, backend, cpu) in parts.items():
        shown = (ratio, cpu_ratio) if name == deep else (1, 1)
        table.add_row(
            name, f"{lower:.2f}", f"{backend:.2f}", f"{seconds[name]:.2f}", f"{shown[0]:.2f}", f"{cpu:.2f}", f"{shown[1]:.2f}"
        )
    console.print(table)
    console.print(f"{deep} take {ratio:.2f} times as long to compile as {shallow}")
    return {
        "bench": "compile",
        "ratio": ratio,
        "ratios": [round(r[deep] / r[shallow], 3) for r in rounds],
        "seconds": seconds,
        "lower_seconds": {name: part[0] for name, part in parts.items()},
        "backend_seconds": {name: part[1] for name, part in parts.items()},
        # Processor time says what the compiler did where other work holds the cores.
        "processor_seconds": {name: part[2] for name, part in parts.items()},
        "processor_ratio": round(cpu_ratio, 3),
        "options": {k: v for k, v in vars(args).items() if k not in ("name", "json")},
        **provenance(),
    }


def _check(args: argparse.Namespace) -> None:
    for name, least in (("layers", 2), ("base_layers", 2), ("batch_size", 1), ("tokens", 1), ("repeats", 1)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")
    if args.layers == args.base_layers:
        raise ValueError(f"--layers and --base-layers are both {args.layers}; give two depths to compare")


def _run_config(args: argparse.Namespace, layers: int) -> RunConfig:
    return RunConfig(
        model=tiny_moe(num_hidden_layers=layers),
        steps=1,
        batch_size=args.batch_size,
        seq_len=args.tokens,
        remat=args.remat,
        data=DataConfig(kind="standard_library"),
    )


def _compile_step(config: RunConfig, phases: list[tuple[float, float, float]]) -> None:
    """Traces, lowers and compiles the step from nothing; appends the seconds of (trace and lower, compile, processor)."""
    jax.clear_caches()
    layout = run_layout(config, one_device_mesh())
    shape = (config.batch_size, config.seq_len)
    shardings = batch_shardings(layout, multimodal=False)
    batch = {key: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=where) for key, where in shardings.items()}
    state = abstract_state(config, layout)
    start, processor = time.perf_counter(), time.process_time()
    lowered = make_train_step(config, layout).lower(state, batch)
    middle = time.perf_counter()
    lowered.compile()
    phases.append((middle - start, time.perf_counter() - middle, time.process_time() - processor))
