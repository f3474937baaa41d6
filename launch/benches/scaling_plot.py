"""The plot of `bench.py scaling`: one panel an axis, both scales logarithmic, with the fitted line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def check_plot(path: Path) -> None:
    """Refuses, before any work, a file that could not be drawn.

    Raises:
      ValueError: a suffix that names no image format.
    """
    known = sorted(FigureCanvasAgg.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in known:
        raise ValueError(f"--plot {path}: its suffix names no image format; expected one of {', '.join(known)}")


def draw(axes: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Writes the plot; the folder is made if need be.

    Args:
      axes: axis -> {"points": [{"size", "seconds", "flops"}], "exponent", "flops_exponent"}.
      path: image file.
    """
    figure = Figure(figsize=(3.4 * len(axes), 3.2), layout="constrained")
    for panel, (axis, result) in zip(np.atleast_1d(figure.subplots(1, len(axes))), axes.items(), strict=True):
        sizes, seconds, flops = (np.array([p[key] for p in result["points"]], float) for key in ("size", "seconds", "flops"))
        centre = np.exp(np.log(seconds).mean()) * (sizes / np.exp(np.log(sizes).mean())) ** result["exponent"]
        panel.loglog(sizes, seconds * 1e3, "o", label="measured")
        panel.loglog(sizes, centre * 1e3, "-", label=f"exponent {result['exponent']:.2f}")
        panel.loglog(sizes, seconds[0] * 1e3 * flops / flops[0], ":", color="grey", label="as the model FLOPs")
        panel.set_xticks(sizes, [f"{size:g}" for size in sizes], rotation=45)
        panel.minorticks_off()
        # A flat axis would otherwise be stretched until noise fills the panel.
        low, high = panel.get_ylim()
        panel.set_ylim(min(low, seconds.min() * 1e3 / 2), max(high, seconds.max() * 1e3 * 2))
        panel.set_xlabel(axis)
        panel.set_ylabel("ms a step")
        panel.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=120)
