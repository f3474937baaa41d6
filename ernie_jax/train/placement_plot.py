"""A picture of the devices' loads before and after experts were moved. L MoE layers, G devices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ernie_jax.train.plots import write_figure


def plot_placement(loads: Mapping[str, tuple[np.ndarray, np.ndarray]], path: str | Path, *, title: str = "") -> Path:
    """Write a PNG: for each kind of experts, every layer's device loads before and after, and each layer's fullest device.

    Args:
      loads: name -> ([L, G] before, [L, G] after).
      path: file to write; its folder is made.
      title: heading.

    Returns:
      The path.
    """
    figure = Figure(figsize=(15, 4.5 * len(loads)), layout="constrained")
    for row, (name, pair) in zip(figure.subplots(len(loads), 3, squeeze=False), loads.items(), strict=True):
        before, after = (np.asarray(load) / np.maximum(np.mean(load, axis=-1, keepdims=True), 1e-9) for load in pair)
        top = max(2.0, float(before.max()), float(after.max()))
        for axes, load, when in ((row[0], before, "before"), (row[1], after, "after")):
            _draw_devices(figure, axes, load, top, f"{name}, {when} (1 = even share)")
        _draw_fullest(row[2], before, after)
    return write_figure(figure, path, title)


def _draw_devices(figure: Figure, axes: Any, load: np.ndarray, top: float, title: str) -> None:
    # The same colours before and after, white at an even share.
    image = axes.imshow(load, aspect="auto", cmap="coolwarm", vmin=2.0 - top, vmax=top, interpolation="nearest")
    axes.set(xlabel="device of the expert axis", ylabel="MoE layer", title=title)
    axes.set_xticks(range(load.shape[1]))
    axes.set_yticks(range(load.shape[0]))
    figure.colorbar(image, ax=axes)


def _draw_fullest(axes: Any, before: np.ndarray, after: np.ndarray) -> None:
    layers = np.arange(len(before))
    rates = [float(np.mean(1 / np.maximum(load.max(-1), 1.0))) for load in (before, after)]
    axes.bar(layers - 0.2, before.max(-1), width=0.4, label=f"before, balance rate {rates[0]:.3f}")
    axes.bar(layers + 0.2, after.max(-1), width=0.4, label=f"after, balance rate {rates[1]:.3f}")
    axes.axhline(1.0, color="gray", linestyle="--", linewidth=1)
    axes.set(xlabel="MoE layer", ylabel="load of the fullest device (1 = even share)", title="Fullest device")
    axes.set_xticks(layers)
    axes.legend(loc="lower center")
