"""What `train`, `prefill` and `decode` share: our side in turns with the machine's limits and, if asked, with transformers."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benches import rival
from benches.fake_devices import fake_devices, fast_environment
from benches.load import busy_seconds, other_cores
from benches.workers import Worker, take_turns

OURS, RIVAL, MACHINE = "ernie_jax", "transformers", "machine"
# The first run compiles, the second still meets memory for the first time.
WARM_UP = 2
# Other work beyond this share of a core makes figures doubtful: a side whose threads wait for each other suffers most.
QUIET = 0.1

Round = Mapping[str, Mapping[str, Mapping[str, float]]]
Results = Mapping[str, Mapping[str, list[Any]]]


@dataclass(frozen=True)
class SideSpec:
    """A side before its process starts: see `Worker`."""

    factory: str
    options: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """What the rounds gave.

    Attributes:
      rounds: side -> part -> {"seconds", "cpu_seconds"}, one a round.
      results: side -> part -> what each run returned, the `WARM_UP` untimed ones first.
      memory: side -> {"peak", "net"}, resident bytes.
      facts: side -> what it says of itself, before and after the rounds.
      other_cores: how many cores other processes held during the rounds, on average; None where the system does not tell.
    """

    rounds: list[Round]
    results: Results
    memory: Mapping[str, Mapping[str, int | None]]
    facts: Mapping[str, Mapping[str, Any]]
    other_cores: float | None

    @property
    def peak_flops(self) -> float:
        """FLOP/s of a matrix product, median over the rounds."""
        return statistics.median(self.results[MACHINE]["matmul"][WARM_UP:])

    @property
    def bandwidth(self) -> float:
        """Bytes/s of reading memory, median over the rounds."""
        return statistics.median(self.results[MACHINE]["bandwidth"][WARM_UP:])

    def machine_fields(self) -> dict[str, object]:
        """The machine's part of a result."""
        peaks = self.results[MACHINE]["matmul"][WARM_UP:]
        return {
            "peak_gflops": round(self.peak_flops / 1e9, 2),
            "peak_gflops_range": [round(min(peaks) / 1e9, 2), round(max(peaks) / 1e9, 2)],
            "bandwidth_gbs": round(self.bandwidth / 1e9, 2),
            "other_cores": self.other_cores,
            "machine": dict(self.facts[MACHINE]),
        }


def add_comparison_arguments(parser: argparse.ArgumentParser, repeats: int) -> None:
    """Declares whom to compare with and how long to measure."""
    parser.add_argument("--against", choices=[RIVAL], help=f"also the same work in {RIVAL}, in turns; needs {rival.INSTALL}")
    parser.add_argument("--repeats", type=int, default=repeats, help="most rounds; the figures are medians over them")
    parser.add_argument(
        "--seconds", "--max-seconds", type=float, default=120.0, help="start no further round after this long, once three are done"
    )


def check_comparison(args: argparse.Namespace) -> None:
    """Refuses, before any work, a comparison with what is not installed.

    Raises:
      ValueError: with the command that installs it.
    """
    if args.against is not None:
        rival.check_installed()


def machine(args: argparse.Namespace, *, cpu: bool = False) -> SideSpec:
    """The side that measures the machine."""
    return SideSpec("benches.machine:Machine", {"dtype": args.dtype}, fake_devices(1, cpu=cpu))


def measure(
    sides: Mapping[str, SideSpec], args: argparse.Namespace, console: Console, check: Callable[[Results], None]
) -> Measured:
    """Starts the sides in order, warms them up, checks that they agree, and times them in turns.

    Args:
      sides: by name.
      args: with `repeats` and `seconds`.
      console: shows the progress on a terminal.
      check: is given the results of the warm-up; raises where the sides did not compute the same.

    Raises:
      ValueError: what a side refused.
      RuntimeError: sides that disagree, or a side that failed.
    """
    with contextlib.ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for name, side in sides.items():
            with _status(console, f"starting {name}"):
                environment = fast_environment() | dict(side.environment)
                workers[name] = stack.enter_context(Worker(side.factory, side.options, environment=environment))
        for name, worker in workers.items():
            with _status(console, f"warming up {name}"):
                for _ in range(WARM_UP):
                    worker.run()
        check({name: worker.results() for name, worker in workers.items()})
        rounds: Iterable[Round] = take_turns(workers, args.repeats, args.seconds, warm_up=0)
        if console.is_terminal:
            rounds = track(rounds, total=args.repeats, description=" / ".join(sides), console=console, transient=True)
        begin, busy, before = time.perf_counter(), busy_seconds(), sum(worker.spent for worker in workers.values())
        rounds = list(rounds)
        own = sum(worker.spent for worker in workers.values()) - before
        others = other_cores(busy, own, time.perf_counter() - begin)
        warn_if_busy(others, console)
        return Measured(
            rounds,
            {name: worker.results() for name, worker in workers.items()},
            {name: worker.memory() for name, worker in workers.items()},
            {name: worker.facts | worker.final() for name, worker in workers.items()},
            others,
        )


def figures(measured: Measured, seconds_of: Callable[[Round, str], float], tokens: int, flops: float) -> dict[str, Any]:
    """Speeds of our side, of transformers where it ran, and of the machine: the fields every comparison has.

    Args:
      measured: the rounds.
      seconds_of: seconds of the work in one round of one side.
      tokens: that the work covers.
      flops: model FLOPs of the work.

    Raises:
      RuntimeError: work that took no measurable time.
    """
    names = [name for name in (OURS, RIVAL) if name in measured.facts]
    speeds = {}
    for name in names:
        seconds = statistics.median(seconds_of(r, name) for r in measured.rounds)
        if seconds <= 0:
            raise RuntimeError(
                f"the work of {name} took {seconds:.2g} s, which is noise; measure more of it at once (--new, --batch-size)"
            )
        mfu = flops / seconds / measured.peak_flops
        speeds[name] = {"tokens_per_s": tokens / seconds, "mfu": round(mfu, 4), "seconds": seconds}
    compared = RIVAL in speeds
    return {
        **speeds[OURS],
        "speedup": round(speeds[OURS]["tokens_per_s"] / speeds[RIVAL]["tokens_per_s"], 3) if compared else None,
        "speedups": [round(seconds_of(r, RIVAL) / seconds_of(r, OURS), 3) for r in measured.rounds] if compared else None,
        RIVAL: speeds[RIVAL] | {"settings": dict(measured.facts[RIVAL])} if compared else None,
        "rounds": len(measured.rounds),
        "tokens": tokens,
        "flops": flops,
        **measured.machine_fields(),
    }


def memory_fields(measured: Measured) -> dict[str, object]:
    """Peak resident bytes of both sides without their libraries, ours over theirs, and both with libraries."""
    net = {name: measured.memory[name]["net"] if name in measured.memory else None for name in (OURS, RIVAL)}
    peak = {name: measured.memory[name]["peak"] if name in measured.memory else None for name in (OURS, RIVAL)}
    ours, theirs = net[OURS], net[RIVAL]
    return {**net, "ratio": None if ours is None or not theirs else round(ours / theirs, 3), "with_libraries": peak}


def speed_table(title: str, result: Mapping[str, Any], **columns: Mapping[str, str]) -> Table:
    """One row a side; `columns` are further ones, heading (underscores are blanks) -> side -> text."""
    table = Table(title=title)
    headings = ("", "ms", "tokens/s", "MFU", *(name.replace("_", " ") for name in columns))
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left")
    for name, speed in ((OURS, result), (RIVAL, result[RIVAL])):
        if speed is not None:
            further = [column.get(name, "") for column in columns.values()]
            table.add_row(name, f"{speed['seconds'] * 1e3:.1f}", f"{speed['tokens_per_s']:,.0f}", f"{speed['mfu']:.1%}", *further)
    return table


def conclusion(result: Mapping[str, Any]) -> str:
    """The last line of the table: the machine, and the speedup where there is one."""
    machine = f"matrix product {result['peak_gflops']:.0f} GFLOP/s, memory {result['bandwidth_gbs']:.1f} GB/s in the same run"
    if result["speedup"] is None:
        return machine
    return f"{result['speedup']:.2f} times {RIVAL}, medians of {result['rounds']} rounds; {machine}"


def options_of(args: argparse.Namespace) -> dict[str, object]:
    """The options that made a result."""
    return {k: v for k, v in vars(args).items() if k not in ("name", "json")}


def warn_if_busy(cores: float | None, console: Console) -> None:
    """Says that other work disturbed the figures, where it did."""
    if cores is not None and cores > QUIET:
        console.print(f"other processes held {cores:.1f} cores meanwhile: doubtful until repeated on a quiet machine")


def _status(console: Console, text: str) -> contextlib.AbstractContextManager[object]:
    return console.status(text) if console.is_terminal else contextlib.nullcontext()
