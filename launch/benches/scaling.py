"""How the time of a training step grows with tokens, experts, layers, vocabulary and sequence, one axis at a time.

Each axis changes one size of a common base; along `experts` the active width stays (same experts a token, same width), along
`sequence` the tokens of a step stay. An exponent is the slope of the least-squares line through log(time) over log(size); that of
the model FLOPs through the same sizes stands beside it, for cost is to grow with active work.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benches.comparison import WARM_UP, options_of, warn_if_busy
from benches.fake_devices import fake_devices
from benches.load import busy_seconds, other_cores
from benches.model import add_model_arguments, check_at_least, random_tokens, run_config, train_flops
from benches.provenance import provenance
from benches.scaling_plot import check_plot, draw
from benches.train import Step
from benches.workers import Worker, take_turns

# Of the base's size; those of the experts are absolute.
MULTIPLES = {"tokens": (0.25, 0.5, 1, 2), "layers": (0.5, 1, 2, 4), "vocabulary": (0.5, 1, 2, 4)}
EXPERTS = (8, 16, 32, 64, 128)
SEQUENCE_MULTIPLES = (0.25, 0.5, 1, 2, 4)
AXES = ("tokens", "experts", "layers", "vocabulary", "sequence")


def load() -> None:
    """Starts the backend."""
    jax.devices()


class Steps:
    """Side with one part a point of an axis: a training step of `options["points"]`, name -> options of `benches.train.Step`."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._steps = {name: Step(point) for name, point in options["points"].items()}
        self.parts: Sequence[str] = tuple(self._steps)
        self.facts: dict[str, Any] = {name: step.facts for name, step in self._steps.items()}

    def run(self, part: str) -> float:
        """One step of that point."""
        return self._steps[part].run("step")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `bench.py scaling`."""
    add_model_arguments(parser)
    # Half the depth of the other benches: all points of an axis are held at once.
    parser.set_defaults(layers=4)
    parser.add_argument("--batch-size", type=int, default=4, help="rows of the base")
    parser.add_argument("--tokens", type=int, default=512, help="tokens a row of the base")
    parser.add_argument("--axes", default=",".join(AXES), help="comma list of the axes to measure")
    parser.add_argument("--points", type=int, default=5, help="most sizes an axis; fewer leave out sizes between the ends")
    parser.add_argument("--repeats", type=int, default=7, help="most rounds an axis; the figures are medians over them")
    parser.add_argument(
        "--seconds",
        "--max-seconds",
        type=float,
        default=60.0,
        help="start no further round of an axis after this long, once three are done",
    )
    parser.add_argument("--plot", type=Path, default=Path("runs/scaling.png"), help="where to draw it")


def run(args: argparse.Namespace) -> dict[str, object]:
    """Measures, prints the table, draws the plot and returns the result.

    Raises:
      ValueError: sizes that do not fit, an axis that is not one, a plot of a format that is not known.
    """
    check_at_least(vars(args), batch_size=1, tokens=2, points=2, repeats=1)
    axes = _axes(args)
    check_plot(args.plot)
    planned = {axis: _points(axis, args) for axis in axes}
    console = Console()
    count = sum(map(len, planned.values()))
    console.print(
        f"training steps of {count} sizes along {', '.join(axes)}, base {args.batch_size} x {args.tokens} tokens, "
        f"{args.layers} layers, {args.experts} experts, {args.dtype}: at most {args.repeats} rounds"
    )
    results = {}
    for axis, points in planned.items():
        results[axis] = _measure(axis, points, args, console)
    table = Table(title="time of a training step")
    for heading in ("axis", "sizes", "ms", "exponent", "exponent of FLOPs"):
        table.add_column(heading, justify="right" if "exponent" in heading else "left")
    for axis, result in results.items():
        sizes, times = ([point[key] for point in result["points"]] for key in ("size", "seconds"))
        table.add_row(
            axis,
            " ".join(map(str, sizes)),
            " ".join(f"{s * 1e3:.0f}" for s in times),
            f"{result['exponent']:.2f}",
            f"{result['flops_exponent']:.2f}",
        )
    console.print(table)
    draw(results, args.plot)
    ratio = results["experts"]["ratio"] if "experts" in results else None
    if ratio is not None:
        first, last = (results["experts"]["points"][i]["size"] for i in (0, -1))
        console.print(f"{last} experts take {ratio:.2f} times as long as {first} of equal active width")
    console.print(f"plot: {args.plot}")
    return {
        "bench": "scaling",
        "experts_ratio": ratio,
        "exponents": {axis: result["exponent"] for axis, result in results.items()},
        "axes": results,
        "plot": str(args.plot),
        "options": options_of(args) | {"plot": str(args.plot)},
        **provenance(),
    }


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Slope of the least-squares line through log(values) over log(sizes)."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def _axes(args: argparse.Namespace) -> list[str]:
    axes = [axis.strip() for axis in args.axes.split(",")]
    unknown = [axis for axis in axes if axis not in AXES]
    if unknown or len(set(axes)) < len(axes):
        raise ValueError(f"--axes {args.axes}; expected a comma list, each once, of {', '.join(AXES)}")
    return axes


def _sizes(axis: str, args: argparse.Namespace) -> list[int]:
    """The sizes of an axis, ascending, at most `--points` with both ends.

    Raises:
      ValueError: a base so small that an axis has no two sizes.
    """
    if axis == "experts":
        sizes = [count for count in EXPERTS if count >= args.experts_per_token]
    elif axis == "sequence":
        # Rows of the step's tokens, all of them full.
        lengths = {int(args.tokens * multiple) for multiple in SEQUENCE_MULTIPLES}
        sizes = [length for length in lengths if length >= 2 and args.batch_size * args.tokens % length == 0]
    elif axis == "tokens":
        sizes = [int(args.batch_size * multiple) * args.tokens for multiple in MULTIPLES[axis] if args.batch_size * multiple >= 1]
    else:
        base, least = (args.layers, 2) if axis == "layers" else (args.vocab, 8)
        sizes = [int(base * multiple) for multiple in MULTIPLES[axis] if base * multiple >= least]
    sizes = sorted(set(sizes))
    if len(sizes) < 2:
        raise ValueError(
            f"--axes {axis}: {args.batch_size} x {args.tokens} tokens, {args.layers} layers, vocabulary {args.vocab} and "
            f"{args.experts_per_token} experts a token leave only the sizes {sizes}; give a larger base"
        )
    kept = np.unique(np.linspace(0, len(sizes) - 1, min(args.points, len(sizes))).round().astype(int))
    return [sizes[i] for i in kept]


def _points(axis: str, args: argparse.Namespace) -> dict[int, dict[str, Any]]:
    """Size -> the options of `benches.train.Step` and the model FLOPs of that step."""
    points = {}
    for size in _sizes(axis, args):
        options = vars(args) | {name: size for name in ("experts", "layers") if name == axis}
        if axis == "vocabulary":
            options["vocab"] = size
        rows = size // args.tokens if axis == "tokens" else args.batch_size
        tokens = args.tokens
        if axis == "sequence":
            rows, tokens = args.batch_size * args.tokens // size, size
        config = run_config(options, batch_size=rows, tokens=tokens)
        points[size] = {
            "step": {"run": config, "tokens": random_tokens(options, rows, tokens), "folder": None},
            "flops": train_flops(config.model, rows, tokens),
        }
    return points


def _measure(axis: str, points: Mapping[int, Mapping[str, Any]], args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Times all sizes of an axis in turns, in one process that ends with it."""
    options = {"points": {str(size): point["step"] for size, point in points.items()}}
    with Worker("benches.scaling:Steps", options, environment=fake_devices(1)) as worker:
        for _ in range(WARM_UP):
            worker.run()
        rounds: Iterable[Mapping[str, Any]] = take_turns({axis: worker}, args.repeats, args.seconds, warm_up=0)
        if console.is_terminal:
            rounds = track(rounds, total=args.repeats, description=axis, console=console, transient=True)
        begin, busy, before = time.perf_counter(), busy_seconds(), worker.spent
        timed = [r[axis] for r in rounds]
        others = other_cores(busy, worker.spent - before, time.perf_counter() - begin)
        warn_if_busy(others, console)
    seconds = {size: [r[str(size)]["seconds"] for r in timed] for size in points}
    medians = [statistics.median(s) for s in seconds.values()]
    flops = [point["flops"] for point in points.values()]
    sizes = list(points)
    low, high = seconds[sizes[0]], seconds[sizes[-1]]
    return {
        "points": [
            {"size": size, "seconds": median, "flops": work, "parameters": worker.facts[str(size)]["parameters"]}
            for size, median, work in zip(sizes, medians, flops, strict=True)
        ],
        "exponent": round(exponent(sizes, medians), 3),
        "flops_exponent": round(exponent(sizes, flops), 3),
        "ratio": round(statistics.median(b / a for a, b in zip(low, high, strict=True)), 3),
        "rounds": len(timed),
        "other_cores": others,
    }
