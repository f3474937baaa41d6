"""Pipeline schedules side by side: memory of the compiled step against microbatches, ticks, bubble, time. S stages, M microbatches.

All schedules train the same model on the same batch in one process of fake devices, taking turns; a stage keeps the inputs of
its chunks and makes activations again in all of them. Microbatches keep their size, so the batch grows with their number: it is an
argument of the step, and temporary bytes are what the step needs beside its arguments. Fake devices share the cores, so the time
in which a stage waits is lent to others and a bubble costs nothing here: times compare the work, the simulator the waiting.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benches.comparison import WARM_UP, options_of, warn_if_busy
from benches.fake_devices import fake_devices
from benches.load import busy_seconds, other_cores
from benches.model import add_model_arguments, check_at_least, random_tokens, run_config
from benches.provenance import provenance
from benches.train import parse_mesh, training_batch
from benches.workers import Worker, take_turns
from ernie_jax.config.pipeline import PIPELINE_SCHEDULES, PipelineConfig
from ernie_jax.config.run import MoETrainConfig, RunConfig
from ernie_jax.models import batch_shardings, run_once_options
from ernie_jax.objectives.step_totals import StepTotals
from ernie_jax.parallel.pipeline import StagePlan, make_timetable, simulate
from ernie_jax.sharding import use_layout
from ernie_jax.train.gradients import loss_weights, split_microbatches, token_weights_of
from ernie_jax.train.pipeline import PipelinedGradients
from ernie_jax.train.state import abstract_state, all_values, init_state, mesh_of, run_layout, trained_values
from ernie_jax.train.step import make_train_step

MESH = "pipeline=4,expert=2"
# The loop over ticks in the compiled step; of the loops inside it the name goes on.
_LOOP = re.compile(r'op_name="[^"]*gradients/shard_map/while".*?"known_trip_count":\{"n":"(\d+)"')


def load() -> None:
    """Starts the backend."""
    jax.devices()


class Schedules:
    """Side with one part a schedule: a training step of `options["runs"]`, name -> (run, the same with more microbatches), on
    `tokens` [B, T]."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        runs: dict[str, tuple[RunConfig, RunConfig]] = options["runs"]
        self.parts: Sequence[str] = tuple(runs)
        self.facts: dict[str, Any] = {}
        self._steps: dict[str, Any] = {}
        self._states: dict[str, Any] = {}
        for name, (run, more) in runs.items():
            layout = run_layout(run, mesh_of(run))
            batch = jax.device_put(training_batch(options["tokens"]), batch_shardings(layout, multimodal=False))
            state = init_state(run, layout)
            compiled, larger = _compiled(run), _compiled(more, run_once_options())
            self.facts[name] = {
                "temp_bytes": [_temp_bytes(compiled), _temp_bytes(larger)],
                "ticks": _ticks(compiled.as_text()),
                "active": _active(run, state, batch),
            }
            self._steps[name], self._states[name], self._batch = compiled, state, batch

    def run(self, part: str) -> float:
        """One step; returns the cross-entropy a token before it."""
        self._states[part], metrics = self._steps[part](self._states[part], self._batch)
        jax.block_until_ready(self._states[part])
        return float(metrics["loss"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `bench.py pipeline`."""
    add_model_arguments(parser)
    # Eight MoE layers for four stages of two chunks, narrow: the programs take longer to compile than to run.
    small = {"hidden": 128, "heads": 4, "head_dim": 32, "dense_width": 384, "experts": 8, "experts_per_token": 2, "width": 64}
    parser.set_defaults(layers=9, vocab=1024, **small)
    parser.add_argument("--mesh", default=MESH, help="axis=size,...: a mesh of that many fake CPU devices, with stages")
    parser.add_argument("--rows", type=int, default=2, help="rows of a microbatch")
    parser.add_argument("--tokens", type=int, default=256, help="tokens a row")
    parser.add_argument("--microbatches", type=int, default=8, help="of the timed step, and the fewer of the memory figures")
    parser.add_argument("--more-microbatches", type=int, default=32, help="the more of the memory figures")
    parser.add_argument("--virtual-stages", type=int, default=2, help="of interleaved")
    parser.add_argument("--repeats", type=int, default=7, help="most rounds; the times are medians over them")
    parser.add_argument("--seconds", type=float, default=60.0, help="start no further round after this long, once three are done")


def run(args: argparse.Namespace) -> dict[str, object]:
    """Measures, prints the table and returns the result.

    Raises:
      ValueError: sizes that do not fit, a mesh without stages.
      RuntimeError: schedules that do not train alike, a run that does not do what the simulator says.
    """
    sizes = _check(args)
    runs = {name: _runs(args, name, sizes) for name in PIPELINE_SCHEDULES}
    ids = random_tokens(vars(args), args.rows * args.microbatches, args.tokens)
    console = Console()
    console.print(
        f"{', '.join(runs)} on {args.mesh} of fake devices: steps of {args.microbatches} microbatches of {args.rows} x "
        f"{args.tokens} tokens, memory at {args.more_microbatches} too; {args.layers} layers, {args.dtype}; "
        "nine programs to compile first"
    )
    environment = fake_devices(math.prod(sizes.values()), cpu=True)
    with Worker("benches.pipeline:Schedules", {"runs": runs, "tokens": ids}, environment=environment) as worker:
        rounds: Iterable[Any] = take_turns({"steps": worker}, args.repeats, args.seconds, warm_up=WARM_UP)
        if console.is_terminal:
            rounds = track(rounds, total=args.repeats, description="rounds", console=console, transient=True)
        begin, busy = time.perf_counter(), busy_seconds()
        rounds = [r["steps"] for r in rounds]
        facts, losses = worker.facts, worker.results()
    others = other_cores(busy, worker.spent, time.perf_counter() - begin)
    warn_if_busy(others, console)
    _check_losses(losses)
    found = {name: _fields(args, runs[name][0], facts[name], rounds, name) for name in runs}
    console.print(*_tables(args, found))
    grown, ratio = found["1f1b"]["growth"], found["1f1b"]["wall_ratio"]
    console.print(
        f"temporary bytes of 1f1b grow by {grown:.1%} from {args.microbatches} to {args.more_microbatches} microbatches, of gpipe "
        f"by {found['gpipe']['growth']:.1%}; 1f1b takes {ratio:.2f} times as long as gpipe, medians of {len(rounds)} rounds"
    )
    return {
        "bench": "pipeline",
        "growth_1f1b": grown,
        "growth_gpipe": found["gpipe"]["growth"],
        "wall_ratio_1f1b": ratio,
        "schedules": found,
        "losses": losses,
        "rounds": len(rounds),
        "other_cores": others,
        "options": options_of(args),
        **provenance(),
    }


def _compiled(run: RunConfig, options: Any = None) -> Any:
    """The training step; the compiler's `options` for programs that hardly run change none of its buffers."""
    layout = run_layout(run, mesh_of(run))
    shape = jax.ShapeDtypeStruct((run.batch_size, run.seq_len), np.int32)
    batch = dict.fromkeys(training_batch(np.zeros((1, 2), np.int32)), shape)
    return make_train_step(run, layout).lower(abstract_state(run, layout), batch).compile(options)


def _temp_bytes(compiled: Any) -> int:
    return int(compiled.memory_analysis().temp_size_in_bytes)


def _ticks(hlo: str) -> int | None:
    """Rounds of the loop over ticks, None where the program's text does not tell."""
    found = [int(n) for n in _LOOP.findall(hlo)]
    return found[0] if len(found) == 1 else None


def _active(run: RunConfig, state: Any, batch: Any) -> list[list[int]]:
    """[S][2] forwards and backwards that each stage ran, counted by the stages."""
    layout = run_layout(run, mesh_of(run))
    gradients = PipelinedGradients.of(run, layout, loss_weights(run), token_weights_of(run))

    def counted(state: Any, batch: Any) -> jax.Array:
        totals = StepTotals.of(batch["labels"], batch["segment_ids"])
        values = trained_values(run, state.params)
        fixed = {path: value for path, value in all_values(state).items() if path not in values}
        with use_layout(layout):
            parts = split_microbatches(batch, run.parts)
        return gradients(values, fixed, parts, totals, count_first=False).active

    active: list[list[int]] = jax.device_get(jax.jit(counted, compiler_options=run_once_options())(state, batch)).tolist()
    return active


def _runs(args: argparse.Namespace, schedule: str, sizes: Mapping[str, int]) -> tuple[RunConfig, RunConfig]:
    virtual = args.virtual_stages if schedule == "interleaved" else 1

    def make(count: int) -> RunConfig:
        return run_config(
            vars(args),
            batch_size=args.rows * count,
            tokens=args.tokens,
            mesh=sizes,
            pipeline=PipelineConfig(schedule=schedule, microbatches=count, virtual_stages=virtual),
            # No second pass that counts choices: it is the same for all schedules.
            moe=MoETrainConfig(balance_scope="microbatch"),
        )

    return make(args.microbatches), make(args.more_microbatches)


def _fields(args: argparse.Namespace, run: RunConfig, facts: Mapping[str, Any], rounds: Sequence[Any], name: str) -> dict[str, Any]:
    stages, virtual, count = run.mesh.pipeline, run.pipeline.virtual_stages, args.microbatches
    table = make_timetable(name, stages=stages, microbatches=count, virtual_stages=virtual)
    # A stage makes activations again in its backward. As long as all stages are equal, any two costs give the same bubble.
    simulated = simulate(table, 1.0, 3.0)
    if facts["active"] != simulated.active.tolist() or facts["ticks"] not in (None, simulated.ticks):
        raise RuntimeError(
            f"{name} ran {facts['active']} forwards and backwards by stage in {facts['ticks']} ticks; the simulator says "
            f"{simulated.active.tolist()} in {simulated.ticks}"
        )
    few, many = facts["temp_bytes"]
    times = {what: [r[name][what] for r in rounds] for what in ("seconds", "cpu_seconds")}
    reference = {what: [r["gpipe"][what] for r in rounds] for what in times}
    ratios = {what: statistics.median(a / b for a, b in zip(times[what], reference[what], strict=True)) for what in times}
    return {
        "temp_bytes": {str(args.microbatches): few, str(args.more_microbatches): many},
        "growth": round(many / few - 1, 4),
        "ticks": facts["ticks"],
        "simulated_ticks": simulated.ticks,
        "active": facts["active"],
        "simulated_active": simulated.active.tolist(),
        "waiting": simulated.waiting.tolist(),
        "bubble": round(simulated.bubble, 4),
        "formula": round((stages - 1) / (virtual * count + stages - 1), 4),
        "seconds": statistics.median(times["seconds"]),
        "cpu_seconds": statistics.median(times["cpu_seconds"]),
        "wall_ratio": round(ratios["seconds"], 3),
        "cpu_ratio": round(ratios["cpu_seconds"], 3),
    }


def _tables(args: argparse.Namespace, found: Mapping[str, Mapping[str, Any]]) -> tuple[Table, Table]:
    """What is counted, and what is timed."""
    few, many = args.microbatches, args.more_microbatches
    counts = Table(
        title=f"pipeline schedules on {args.mesh}", caption="active: forwards + backwards of all stages, run = simulated"
    )
    for heading in ("", f"temp MB M={few}", f"M={many}", "growth", "ticks", "active", "bubble", "formula"):
        counts.add_column(heading, justify="right" if heading else "left")
    times = Table(title="a training step", caption="ratios are to gpipe in the same round")
    for heading in ("", "wall, ms", "ratio", "processor, ms", "ratio"):
        times.add_column(heading, justify="right" if heading else "left")
    for name, f in found.items():
        memory = [f"{size / 1e6:.2f}" for size in f["temp_bytes"].values()]
        active = "+".join(str(n) for n in np.sum(f["active"], axis=0))
        counts.add_row(name, *memory, f"{f['growth']:.1%}", str(f["ticks"]), active, f"{f['bubble']:.1%}", f"{f['formula']:.1%}")
        wall = f"{f['seconds'] * 1e3:.0f}", f"{f['wall_ratio']:.2f}"
        times.add_row(name, *wall, f"{f['cpu_seconds'] * 1e3:.0f}", f"{f['cpu_ratio']:.2f}")
    return counts, times


def _check_losses(losses: Mapping[str, Sequence[float]]) -> None:
    """All schedules start at one loss and are changed alike by the first update."""
    first = losses[PIPELINE_SCHEDULES[0]][:2]
    for name, values in losses.items():
        if not np.allclose(values[:2], first, rtol=1e-4):
            raise RuntimeError(f"{name} does not train the same model: losses {values[:2]} against {first}; the bench is void")


def _check(args: argparse.Namespace) -> dict[str, int]:
    check_at_least(vars(args), rows=1, tokens=2, microbatches=1, virtual_stages=2, repeats=1)
    sizes = parse_mesh(args.mesh)
    stages, shards = sizes.get("pipeline", 1), sizes.get("data", 1) * sizes.get("expert", 1)
    if stages < 2:
        raise ValueError(f"--mesh {args.mesh} has no stages; give it pipeline=2 or more, as {MESH}")
    if args.more_microbatches <= args.microbatches:
        raise ValueError(f"--more-microbatches {args.more_microbatches} must be above --microbatches {args.microbatches}")
    if args.rows % shards:
        raise ValueError(
            f"--rows {args.rows}: --mesh {args.mesh} splits a microbatch over {shards} devices; give a multiple of them"
        )
    StagePlan.spread(args.layers - 1, stages, args.virtual_stages)
    return sizes
