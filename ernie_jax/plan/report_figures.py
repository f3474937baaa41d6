"""The drawings of a plan's report, as SVG with text: memory of stages, time of a step, the pipeline's timetable, the search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from markupsafe import Markup

from ernie_jax.parallel.pipeline import Simulation, Span, make_timetable, simulate
from ernie_jax.plan.candidate import mesh_text
from ernie_jax.plan.step_time import stage_costs
from ernie_jax.plan.svg import Scale, bar, drawing, element, joined, percent
from ernie_jax.plan.topology import GIB

if TYPE_CHECKING:
    from ernie_jax.config.run import RunConfig
    from ernie_jax.plan.candidate import Candidate
    from ernie_jax.plan.memory import StageMemory
    from ernie_jax.plan.step_time import StepTime
    from ernie_jax.plan.topology import Topology

_ROW = 20
# Work narrower than this share of the drawing has no number.
_LEGIBLE = 0.018


def memory_bars(stages: Sequence[StageMemory], capacity: float, budget: float) -> list[Markup]:
    """A bar a stage by category, all on one scale that holds `capacity`; the device's memory and the budget as lines. Bytes."""
    full = max(capacity * 1.02, *(stage.bytes for stage in stages))
    height = 34 if len(stages) <= 4 else 24
    return [_memory_bar(stage, full, capacity, budget, height) for stage in stages]


def _memory_bar(stage: StageMemory, full: float, capacity: float, budget: float, height: int) -> Markup:
    parts, start = [], 0.0
    for name, size in stage.parts.items():
        if size > 0:
            said = f"stage {stage.stage}, {name}: {size / GIB:.2f} GiB"
            parts.append(bar(start / full, size / full, y=2, height=height - 4, title=said, class_=f"c-{name}"))
            start += size
    rest = max(0.0, capacity - start)
    free = bar(start / full, rest / full, y=2, height=height - 4, title=f"free: {rest / GIB:.2f} GiB", class_="free")
    lines = [
        element("line", x1=percent(size / full), x2=percent(size / full), y1=0, y2=height, class_=kind)
        for size, kind in ((budget, "budget"), (capacity, "capacity"))
    ]
    return drawing([free, *parts, *lines], height=height, label=f"memory of stage {stage.stage}", class_="bar")


def step_line(time: StepTime) -> Markup:
    """A step from left to right by part, and under it what is hidden beside its compute; seconds."""
    parts, start, hidden = [], 0.0, 0.0
    shade = 0
    for part in time.parts:
        width = part.seconds / time.seconds
        said = f"{part.name} ({part.kind}): {seconds_text(part.seconds)}, {width:.1%} of the step"
        if part.kind == "hidden":
            parts.append(bar(hidden, width, y=46, height=12, title=said, class_="k-hidden"))
            hidden += width
        else:
            even = " even" if shade % 2 else ""
            parts.append(bar(start, width, y=2, height=38, title=said, class_=f"k-{part.kind}{even}"))
            start += width
            shade += 1
    return drawing(parts, height=60, label="time line of a step", class_="line")


def pipeline_simulation(run: RunConfig, topology: Topology) -> Simulation | None:
    """The run's schedule with the predicted compute of its stages as costs, in seconds; None without stages."""
    if run.mesh.pipeline == 1:
        return None
    costs = stage_costs(run, topology)
    virtual = run.pipeline.virtual_stages
    table = make_timetable(run.pipeline.schedule, stages=costs.stages, microbatches=run.parts, virtual_stages=virtual)
    return simulate(table, costs.forward, costs.backward)


def timetable(simulation: Simulation, *, until: float = 1.0, numbers: bool = False) -> Markup:
    """A row a stage, time to the right up to a share of the whole: forwards, backwards, and where a stage waits."""
    stages, end = len(simulation.busy), simulation.duration * until
    height = _ROW * stages
    grid: dict[tuple[int, bool, bool], list[str]] = {}
    shown = [span for span in simulation.spans if span.end > span.start and span.start < end]
    for span in shown:
        left, right = 10000 * span.start / end, 10000 * min(span.end, end) / end
        piece = f"M{left:.0f} {span.stage * _ROW + 2}H{right:.0f}v{_ROW - 4}H{left:.0f}z"
        grid.setdefault((span.chunk, span.backward, span.microbatch % 2 == 1), []).append(piece)
    paths = [
        element("path", d="".join(pieces), class_=f"{'back' if back else 'fore'} chunk{chunk % 4}{' even' if even else ''}")
        for (chunk, back, even), pieces in sorted(grid.items())
    ]
    idle = [element("rect", x=0, y=stage * _ROW + 2, width=10000, height=_ROW - 4, class_="idle") for stage in range(stages)]
    # Stretched across alone: this inner drawing has no text.
    space = {"width": "100%", "height": height, "viewBox": f"0 0 10000 {height}", "preserveAspectRatio": "none"}
    inner = element("svg", joined([*idle, *paths]), **space)
    labels = [_number(span, end) for span in shown if numbers and (min(span.end, end) - span.start) / end > _LEGIBLE]
    return drawing([inner, *labels], height=height, label="timetable of the pipeline", class_="timetable")


def _number(span: Span, end: float) -> Markup:
    middle = (span.start + min(span.end, end)) / 2 / end
    return element("text", str(span.microbatch), x=percent(middle), y=span.stage * _ROW + _ROW / 2 + 3.5, class_="number")


def scatter(considered: Sequence[Candidate], choice: Candidate | None, capacity: float, budget: float, height: int = 340) -> Markup:
    """Memory of the fullest device against step time of every candidate: ticks and plot, for a grid of two columns."""
    across = Scale.around([candidate.time.seconds for candidate in considered])
    up = Scale.around([*(candidate.memory.bytes / GIB for candidate in considered), capacity / GIB], from_zero=True)
    lines, ticks, marks = [], [], []
    for value in up.ticks():
        lines.append(element("line", x1=0, x2="100%", y1=percent(1 - up(value)), y2=percent(1 - up(value)), class_="grid"))
        ticks.append(element("text", f"{value:g}", x="95%", y=percent(1 - up(value)), dy="0.35em", class_="tick end"))
    for value in across.ticks(5):
        at = percent(across(value))
        lines.append(element("line", x1=at, x2=at, y1=0, y2="100%", class_="grid"))
        marks.append(element("text", seconds_text(value), x=at, y=14, class_="tick middle"))
    limit, device = (percent(1 - up(size / GIB)) for size in (budget, capacity))
    lines.append(element("line", x1=0, x2="100%", y1=device, y2=device, class_="capacity"))
    lines.append(element("line", x1=0, x2="100%", y1=limit, y2=limit, class_="budget"))
    points = [_point(candidate, across, up, "fits" if candidate.fits else "lost", 4.5) for candidate in considered]
    if choice is not None:
        points.append(_point(choice, across, up, "choice", 8))
    plot = drawing([*lines, *points], height=height, label="memory against step time of the candidates", class_="plot")
    left = drawing(ticks, height=height, label="GiB of the fullest device", class_="plot")
    return joined([left, plot, Markup("<span></span>"), drawing(marks, height=20, label="seconds a step", class_="plot")])


def _point(candidate: Candidate, across: Scale, up: Scale, kind: str, radius: float) -> Markup:
    place = {"cx": percent(across(candidate.time.seconds)), "cy": percent(1 - up(candidate.memory.bytes / GIB))}
    said = f"{layout_text(candidate)}: {candidate.memory.bytes / GIB:.1f} GiB, {seconds_text(candidate.time.seconds)}"
    said += f". {candidate.reason}" if candidate.reason else ""
    return element("circle", element("title", said), **place, r=radius, class_=kind)


def layout_text(candidate: Candidate) -> str:
    """The mesh, the schedule and the policy of a candidate in a few words."""
    words = [mesh_text(candidate), *([candidate.schedule] if candidate.schedule else []), f"remat {candidate.remat}"]
    words += [f"ZeRO {candidate.run.mesh.zero}"] if candidate.run.mesh.zero else []
    parts = candidate.run.parts
    return ", ".join([*words, f"{parts} microbatch{'es' if parts > 1 else ''}"])


def seconds_text(value: float) -> str:
    """A duration in a unit that suits it."""
    if value >= 100:
        return f"{value:,.0f} s"
    if value >= 1:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} µs"
