"""The live progress line: one that is rewritten on a terminal, a plain line for each record elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ernie_jax.train.records import Record, Throughput


def _figure(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)


def _count(value: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def progress_line(record: Record, steps: int, overall: float | None) -> str:
    """One line about a record: step, loss, tokens/s, MFU, expert balance (mean over layers), time left.

    Of a vision-language model also the loss of documents with images, and the most patches of a device over the mean, beside what
    a naive split would give.

    Args:
      record: a completed record of a step.
      steps: where the run ends.
      overall: tokens a second of the run so far, for the time left.
    """
    left = (steps - record["step"]) * record["tokens"]
    parts = [
        f"step {record['step']:>{len(str(steps))}}/{steps}",
        f"loss {_figure(record['loss'], '.4f')}",
        f"lr {record['lr']:.2e}",
        f"{_count(record['tokens_per_s'])} tokens/s",
        f"MFU {_figure(record['mfu'], '.1%')}",
    ]
    if record.get("loss_multimodal") is not None:
        parts.insert(2, f"with images {record['loss_multimodal']:.4f}")
    for name, router in (("", "router"), ("vision ", "vision_router")):
        balance = record.get(router, {}).get("balance")
        if balance:
            parts.append(f"{name}balance {sum(balance) / len(balance):.0%}")
    if "image_imbalance" in record:
        parts.append(f"patches {record['image_imbalance']:.2f} (naive {record['image_imbalance_naive']:.2f})")
    if record.get("eval_loss") is not None:
        parts.append(f"held-out {record['eval_loss']:.4f}")
    if record["skipped"]:
        parts.append(f"skipped {record['skipped']}")
    parts.append(f"ETA {_duration(left / overall) if overall else 'n/a'}")
    return "  ".join(parts)


class Progress:
    """Shows records as they come; use as a context manager around the run.

    Args:
      steps: where the run ends.
      throughput: the run's, for the time left.
      console: where to write, standard output by default.
      quiet: show nothing.
    """

    def __init__(self, steps: int, throughput: Throughput, console: Console | None = None, *, quiet: bool = False) -> None:
        self._steps, self._throughput = steps, throughput
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._quiet = quiet
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal and not quiet else None

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, record: Record) -> None:
        """Show a completed record; an evaluation or a sample stays on the screen."""
        if self._quiet:
            return
        line = progress_line(record, self._steps, self._throughput.overall)
        if self._live is None:
            self._console.print(line, markup=False)
        else:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
            if record.get("eval_loss") is not None:
                self._console.print(line, markup=False)
        if "sample" in record:
            self._console.print(f"sample: {record['sample']!r}", markup=False)
