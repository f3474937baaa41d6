"""The planner's choice against what really runs: one model and batch, several of the meshes it ranked. B batch, T tokens.

The plan is made for eight fake devices of this machine, which is measured first. Its choice and the best candidate of each other
mesh are then trained on the same batch from the same weights, in turns, in one process; all must show the same loss. The result is
the choice's time over that of the fastest.
"""

from __future__ import annotations

import argparse
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
from benches.interleaved import median_ratio
from benches.load import busy_seconds, other_cores
from benches.provenance import provenance
from benches.train import training_batch
from benches.workers import Worker, take_turns
from ernie_jax.config import preset
from ernie_jax.config.run import RunConfig
from ernie_jax.models import batch_shardings
from ernie_jax.plan.candidate import Candidate, mesh_text
from ernie_jax.plan.plan import Plan, make_plan
from ernie_jax.plan.tables import settings_text
from ernie_jax.train.state import init_state, mesh_of, run_layout
from ernie_jax.train.step import make_train_step

DEVICES = 8
FEWEST = 2


def load() -> None:
    """Starts the backend."""
    jax.devices()


class Steps:
    """Side with one part a candidate: a training step of `options["runs"]`, name -> run, on `tokens` [B, T]."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        runs: dict[str, RunConfig] = options["runs"]
        self.parts: Sequence[str] = tuple(runs)
        self.facts: dict[str, Any] = {"compile_seconds": {}}
        self._steps: dict[str, Any] = {}
        self._states: dict[str, Any] = {}
        self._batches: dict[str, Any] = {}
        for name, run in runs.items():
            layout = run_layout(run, mesh_of(run))
            batch = jax.device_put(training_batch(options["tokens"]), batch_shardings(layout, multimodal=False))
            state, start = init_state(run, layout), time.perf_counter()
            step: Any = make_train_step(run, layout)
            self._steps[name] = step.lower(state, batch).compile()
            self.facts["compile_seconds"][name] = round(time.perf_counter() - start, 1)
            self._states[name], self._batches[name] = state, batch

    def run(self, part: str) -> float:
        """One step; returns the cross-entropy a token before it."""
        self._states[part], metrics = self._steps[part](self._states[part], self._batches[part])
        jax.block_until_ready(self._states[part])
        return float(metrics["loss"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `bench.py plan`."""
    parser.add_argument("--model", default="quickstart", help="a preset of a text model")
    parser.add_argument("--batch-size", type=int, default=16, help="rows of the global batch")
    parser.add_argument("--tokens", type=int, default=128, help="tokens a row")
    parser.add_argument("--candidates", type=int, default=9, help="that are run, the choice among them, each of another mesh")
    parser.add_argument("--repeats", type=int, default=9, help="most rounds; the times are medians over them")
    parser.add_argument("--seconds", type=float, default=120.0, help="start no further round after this long, once three are done")


def run(args: argparse.Namespace) -> dict[str, object]:
    """Measures, prints the table and returns the result.

    Raises:
      ValueError: a model or sizes that cannot be planned.
      RuntimeError: candidates that do not train alike.
    """
    _check(args)
    console = Console()
    plan = make_plan(
        args.model, f"cpu:{DEVICES}", global_tokens=args.batch_size * args.tokens, seq_len=args.tokens, dtype="float32"
    )
    chosen = candidates(plan, args.candidates)
    console.print(
        f"{args.model}, {args.batch_size} x {args.tokens} tokens: the choice of {plan.ways} ways against {len(chosen) - 1} others "
        f"on {DEVICES} fake devices; {len(chosen)} programs to compile first"
    )
    vocab = preset(args.model).vocab_size
    ids = np.random.default_rng(0).integers(3, vocab, (args.batch_size, args.tokens)).astype(np.int32)
    options = {"runs": {name: candidate.run for name, candidate in chosen.items()}, "tokens": ids}
    with Worker("benches.plan:Steps", options, environment=fake_devices(DEVICES, cpu=True)) as worker:
        rounds: Iterable[Any] = take_turns({"steps": worker}, args.repeats, args.seconds, warm_up=WARM_UP)
        if console.is_terminal:
            rounds = track(rounds, total=args.repeats, description="rounds", console=console, transient=True)
        begin, busy = time.perf_counter(), busy_seconds()
        timed = [r["steps"] for r in rounds]
        facts, losses = worker.facts, worker.results()
    others = other_cores(busy, worker.spent, time.perf_counter() - begin)
    warn_if_busy(others, console)
    _check_losses(losses)
    result = compared(chosen, timed)
    console.print(_table(result["candidates"]))
    console.print(
        f"the choice takes {result['ratio']:.3f} times as long as the fastest, {result['fastest']}; "
        f"rank correlation of predicted and measured times {result['rank_correlation']:.2f}; medians of {len(timed)} rounds"
    )
    return {
        "bench": "plan",
        **result,
        "compile_seconds": facts["compile_seconds"],
        "rounds": len(timed),
        "other_cores": others,
        "options": options_of(args),
        **provenance(),
    }


def candidates(plan: Plan, count: int) -> dict[str, Candidate]:
    """The choice first, then the best of each other mesh, by what they are.

    Raises:
      ValueError: a plan with too few of them.
    """
    found: dict[str, Candidate] = {}
    meshes = set()
    for candidate in plan.considered:
        mesh = tuple(candidate.mesh.values())
        if candidate.fits and mesh not in meshes and len(found) < count:
            meshes.add(mesh)
            found[f"{mesh_text(candidate)}, {settings_text(candidate)}"] = candidate
    if len(found) < FEWEST:
        raise ValueError(f"the plan has {len(found)} candidates that fit; a comparison needs {FEWEST}")
    return found


def compared(chosen: Mapping[str, Candidate], rounds: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """Times of all, predicted and measured; the first is the choice."""
    times = [{name: part["seconds"] for name, part in r.items()} for r in rounds]
    choice = next(iter(chosen))
    medians = {name: statistics.median(r[name] for r in times) for name in chosen}
    fastest = min(medians, key=lambda name: medians[name])
    fields = {
        name: {
            "predicted_seconds": candidate.time.seconds,
            "seconds": medians[name],
            "cpu_seconds": statistics.median(r[name]["cpu_seconds"] for r in rounds),
            "ratio": round(median_ratio(times, name, fastest), 3),
            **{key: candidate.scalars()[key] for key in ("mesh", "schedule", "remat", "zero", "microbatches", "dispatch")},
        }
        for name, candidate in chosen.items()
    }
    predicted = [candidate.time.seconds for candidate in chosen.values()]
    return {
        "ratio": round(median_ratio(times, choice, fastest), 3),
        "choice": choice,
        "fastest": fastest,
        "rank_correlation": round(_rank_correlation(predicted, list(medians.values())), 3),
        "candidates": fields,
    }


def _rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's: of the ranks."""
    ranks = [np.argsort(np.argsort(values)) for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def _table(fields: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(title="a training step", caption="ratios are to the fastest in the same round; the first is the plan's choice")
    for heading in ("", "predicted, ms", "measured, ms", "ratio"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, f in fields.items():
        table.add_row(name, f"{f['predicted_seconds'] * 1e3:.0f}", f"{f['seconds'] * 1e3:.0f}", f"{f['ratio']:.2f}")
    return table


def _check(args: argparse.Namespace) -> None:
    for name, least in (("batch_size", 1), ("tokens", 2), ("candidates", FEWEST), ("repeats", 1)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")
    if preset(args.model).vision is not None:
        raise ValueError(f"--model {args.model} takes images; this bench trains text models")


def _check_losses(losses: Mapping[str, Sequence[float]]) -> None:
    """All start at one loss, and the first update changes it alike."""
    first = next(iter(losses.values()))[:2]
    for name, values in losses.items():
        if not np.allclose(values[:2], first, rtol=1e-4):
            raise RuntimeError(f"{name} does not train the same model: losses {values[:2]} against {first}; the bench is void")
