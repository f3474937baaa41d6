"""Pictures of runs, from their logged records: loss curves, expert loads, one figure of several runs. L MoE layers, E experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

Record = dict[str, Any]


def plot_run(records: Sequence[Record], path: str | Path, *, unigram_entropy: float | None = None, title: str = "") -> Path:
    """Write a PNG with the loss curves and, for a mixture-of-experts model, the load of each expert in each layer.

    A vision-language model has a loss curve for each kind of document, and a picture of the loads of each modality's experts.

    Args:
      records: lines of `metrics.jsonl`, in order of steps.
      path: file to write; its folder is made.
      unigram_entropy: nats a token of the corpus' token frequencies, drawn as the line a model has to get under.
      title: heading.

    Returns:
      The path.

    Raises:
      ValueError: no records.
    """
    if not records:
        raise ValueError("nothing to plot: no record was logged; lower config.log_every below the number of steps")
    names = {"router": "text expert", "vision_router": "vision expert"}
    loads = {name: load for name in names if (load := _load_by_layer(records, name)) is not None}
    # A Figure of its own, not pyplot's: no global state, no display.
    figure = Figure(figsize=(8 + 6 * len(loads), 5), layout="constrained")
    axes = figure.subplots(1, 1 + len(loads), squeeze=False)[0]
    _draw_loss(axes[0], records, unigram_entropy)
    for place, (name, load) in enumerate(loads.items(), 1):
        _draw_load(figure, axes[place], load, names[name] if len(loads) > 1 else "expert")
    return write_figure(figure, path, title)


def plot_comparison(runs: Mapping[str, Sequence[Record]], metrics: Sequence[str], path: str | Path) -> Path:
    """Write a PNG with one panel a metric and one curve a run.

    Args:
      runs: name of a run -> its records.
      metrics: `loss`, `vision_router.gate_cosine`, ...: a key of the records, or of a section of them; lists are averaged.
      path: file to write; its folder is made.

    Raises:
      ValueError: a metric that no record of any run has, with those there are.
    """
    figure = Figure(figsize=(6 * len(metrics), 4.5), layout="constrained")
    for axes, metric in zip(figure.subplots(1, len(metrics), squeeze=False)[0], metrics, strict=True):
        drawn = False
        for name, records in runs.items():
            points = [(r["step"], value) for r in records if (value := metric_of(r, metric)) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), label=name, linewidth=1.4)
                drawn = True
        if not drawn:
            known = sorted({key for records in runs.values() for r in records for key in _metrics(r)})
            raise ValueError(f"no run has the metric {metric!r}; there are {', '.join(known)}")
        axes.set(xlabel="step", title=metric)
        axes.grid(alpha=0.3)
        axes.legend()
    return write_figure(figure, path)


def metric_of(record: Record, metric: str) -> float | None:
    """A number of a record by its name, `section.key` for one in a section; a list's mean; None where there is none."""
    value: Any = record
    for key in metric.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return None if value is None or isinstance(value, str | Mapping) else float(np.mean(value))


def _metrics(record: Record) -> list[str]:
    inner = [f"{key}.{name}" for key, value in record.items() if isinstance(value, Mapping) for name in value]
    return [*(key for key, value in record.items() if isinstance(value, int | float)), *inner]


def write_figure(figure: Figure, path: str | Path, title: str = "") -> Path:
    """Write a figure as a PNG, under a heading where there is one, into a folder made if missing; returns the path."""
    if title:
        figure.suptitle(title)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def _load_by_layer(records: Sequence[Record], router: str) -> np.ndarray | None:
    """[L, E] mean over the last quarter of the records of each expert's load relative to an even share; None without MoE layers."""
    recent = [r[router]["load"] for r in records[-max(1, len(records) // 4) :] if r.get(router)]
    if not recent:
        return None
    load = np.mean(np.asarray(recent, np.float64), axis=0)
    even: np.ndarray = load / np.maximum(load.mean(-1, keepdims=True), 1e-9)
    return even


def _draw_loss(axes: Any, records: Sequence[Record], unigram_entropy: float | None) -> None:
    curves = {"loss_text": "text", "loss_multimodal": "with images"} if "loss_text" in records[-1] else {"loss": "train"}
    for key, label in curves.items():
        losses = [np.nan if r.get(key) is None else r[key] for r in records]
        axes.plot([r["step"] for r in records], losses, label=label, linewidth=1.2)
    evals = [(r["step"], r["eval_loss"]) for r in records if r.get("eval_loss") is not None]
    if evals:
        axes.plot(*zip(*evals, strict=True), label="held out", marker="o", markersize=4)
    if unigram_entropy is not None:
        axes.axhline(unigram_entropy, color="gray", linestyle="--", linewidth=1, label="unigram entropy")
    axes.set(xlabel="step", ylabel="loss (nats a token)", title="Loss")
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_load(figure: Figure, axes: Any, load: np.ndarray, label: str) -> None:
    image = axes.imshow(load, aspect="auto", cmap="coolwarm", vmin=0.0, vmax=2.0, interpolation="nearest")
    axes.set(xlabel=label, ylabel="MoE layer", title="Expert load (1 = even share, last quarter of the run)")
    axes.set_yticks(range(load.shape[0]))
    figure.colorbar(image, ax=axes)
