"""A picture of pipeline schedules: which stage works on which microbatch, and when it waits. S stages, M microbatches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ernie_jax.parallel.pipeline import Simulation, Span
from ernie_jax.train.plots import write_figure

_COLOURS = {False: "Blues", True: "Oranges"}
_IDLE = "#d9d9d9"
# A number needs this share of the width of the picture; narrower work is drawn without.
_LEGIBLE = 0.007


def plot_timetable(simulations: Mapping[str, Simulation], path: str | Path, *, title: str = "") -> Path:
    """Write a PNG with a panel a schedule: a row a stage, time to the right, the number of the microbatch in each piece of work.

    Forwards are blue and backwards orange, later chunks of a stage darker; grey is time in which a stage waits. All panels have
    one scale of time, so that a schedule that ends sooner looks shorter.

    Args:
      simulations: name of a schedule -> what `parallel.pipeline.simulate` makes of it.
      path: file to write; its folder is made.
      title: heading.

    Returns:
      The path.

    Raises:
      ValueError: nothing to draw.
    """
    if not simulations:
        raise ValueError("no schedule to draw; give at least one simulation by name")
    return write_figure(timetable_figure(simulations), path, title)


def timetable_figure(simulations: Mapping[str, Simulation]) -> Figure:
    """The figure of `plot_timetable`, for a notebook."""
    heights = [0.9 + 0.42 * len(found.busy) for found in simulations.values()]
    figure = Figure(figsize=(15, sum(heights)), layout="constrained")
    panels = figure.subplots(len(simulations), 1, squeeze=False, height_ratios=heights)[:, 0]
    longest = max(found.duration for found in simulations.values())
    for axes, (name, found) in zip(panels, simulations.items(), strict=True):
        _draw(axes, name, found, longest)
    return figure


def _draw(axes: Any, name: str, found: Simulation, longest: float) -> None:
    stages = len(found.busy)
    chunks = 1 + max(span.chunk for span in found.spans)
    axes.barh(range(stages), [found.duration] * stages, height=0.86, color=_IDLE)
    drawn = [span for span in found.spans if span.end > span.start]
    axes.barh(
        [span.stage for span in drawn],
        [span.end - span.start for span in drawn],
        left=[span.start for span in drawn],
        height=0.86,
        color=[_colour(span.backward, span.chunk, chunks) for span in drawn],
        edgecolor="white",
        linewidth=0.5,
    )
    for span in drawn:
        if span.end - span.start >= _LEGIBLE * longest:
            _write_number(axes, span, chunks)
    axes.set(
        xlim=(0, longest),
        ylabel="stage",
        xlabel="time (unit of the costs)",
        title=f"{name}: bubble {found.bubble:.1%}, at most {found.waiting.max()} inputs wait at a stage",
    )
    axes.set_yticks(range(stages))
    axes.invert_yaxis()
    kinds = [(back, chunk) for back in (False, True) for chunk in range(chunks) if any(s.backward == back for s in drawn)]
    labels = [("backward" if back else "forward") + (f", chunk {chunk}" if chunks > 1 else "") for back, chunk in kinds]
    handles = [Patch(color=_colour(*kind, chunks), label=label) for kind, label in zip(kinds, labels, strict=True)]
    axes.legend(handles=[*handles, Patch(color=_IDLE, label="waits")], loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)


def _colour(backward: bool, chunk: int, chunks: int) -> tuple[float, float, float, float]:
    red, green, blue, alpha = colormaps[_COLOURS[backward]](float(np.linspace(0.4, 0.8, chunks)[chunk]))
    return red, green, blue, alpha


def _write_number(axes: Any, span: Span, chunks: int) -> None:
    dark = chunks > 1 and span.chunk >= chunks / 2
    middle = (span.start + span.end) / 2
    axes.text(middle, span.stage, str(span.microbatch), ha="center", va="center", fontsize=7, color="white" if dark else "black")
