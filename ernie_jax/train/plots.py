"""Pictures of a run, from its logged records: the loss curve and the expert-load heat map. L MoE layers, E experts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

Record = dict[str, Any]


def plot_run(records: Sequence[Record], path: str | Path, *, unigram_entropy: float | None = None, title: str = "") -> Path:
    """Write a PNG with the loss curves and, for a mixture-of-experts model, the load of each expert in each layer.

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
    load = _load_by_layer(records)
    # A Figure of its own, not pyplot's: no global state, no display.
    figure = Figure(figsize=(14 if load is not None else 8, 5), layout="constrained")
    axes = figure.subplots(1, 2 if load is not None else 1, squeeze=False)[0]
    _draw_loss(axes[0], records, unigram_entropy)
    if load is not None:
        _draw_load(figure, axes[1], load)
    if title:
        figure.suptitle(title)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def _load_by_layer(records: Sequence[Record]) -> np.ndarray | None:
    """[L, E] mean over the last quarter of the records of each expert's load relative to an even share; None without MoE layers."""
    recent = [r["router"]["load"] for r in records[-max(1, len(records) // 4) :] if r.get("router")]
    if not recent:
        return None
    load = np.mean(np.asarray(recent, np.float64), axis=0)
    even: np.ndarray = load / np.maximum(load.mean(-1, keepdims=True), 1e-9)
    return even


def _draw_loss(axes: Any, records: Sequence[Record], unigram_entropy: float | None) -> None:
    losses = [np.nan if r["loss"] is None else r["loss"] for r in records]
    axes.plot([r["step"] for r in records], losses, label="train", linewidth=1.2)
    evals = [(r["step"], r["eval_loss"]) for r in records if r.get("eval_loss") is not None]
    if evals:
        axes.plot(*zip(*evals, strict=True), label="held out", marker="o", markersize=4)
    if unigram_entropy is not None:
        axes.axhline(unigram_entropy, color="gray", linestyle="--", linewidth=1, label="unigram entropy")
    axes.set(xlabel="step", ylabel="loss (nats a token)", title="Loss")
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_load(figure: Figure, axes: Any, load: np.ndarray) -> None:
    image = axes.imshow(load, aspect="auto", cmap="coolwarm", vmin=0.0, vmax=2.0, interpolation="nearest")
    axes.set(xlabel="expert", ylabel="MoE layer", title="Expert load (1 = even share, last quarter of the run)")
    axes.set_yticks(range(load.shape[0]))
    figure.colorbar(image, ax=axes)
