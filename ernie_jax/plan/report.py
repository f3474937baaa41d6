"""A plan as one HTML page: what was chosen and why, with drawings; nothing is loaded from anywhere, so that it can be sent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from ernie_jax.plan.candidate import mesh_text
from ernie_jax.plan.report_figures import (
    layout_text,
    memory_bars,
    pipeline_simulation,
    scatter,
    seconds_text,
    step_line,
    timetable,
)
from ernie_jax.plan.topology import GIB

if TYPE_CHECKING:
    from ernie_jax.plan.candidate import Candidate
    from ernie_jax.plan.comparison import Comparison
    from ernie_jax.plan.plan import Plan

_TEMPLATE = "report.html.jinja"
# Pieces of work of a pipeline beyond which its whole timetable is not drawn: they would be narrower than a pixel.
_MOST_PIECES = 20_000
# A prediction further off the compiled figure is marked.
_CLOSE = 0.1


@dataclass(frozen=True)
class Table:
    """Columns and rows of text; columns named in `numbers` are set to the right."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[str] = frozenset()


def write_report(plan: Plan, path: str | Path) -> Path:
    """Write a plan as one self-contained HTML file.

    It has the choice in a sentence and as a table, the memory of each pipeline stage by category, a time line of the step, the
    timetable of the pipeline, all candidates by memory and time, the runners-up with the reason why each lost, the collectives,
    the topology's constants with their sources, and, where `plan.compiled` is set, its `rows` (`comparison.Comparison`) of
    predicted and compiled figures. Of a plan in which nothing fits it shows the nearest miss.

    Args:
      plan: what to show.
      path: file to write; its folder is made.

    Returns:
      The path.

    Raises:
      ValueError: the path is a folder, or is not named .html.
    """
    target = Path(path)
    if target.is_dir() or target.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"report {path}; expected the name of a file that ends with .html")
    page = render_report(plan)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page, encoding="utf-8")
    return target


def render_report(plan: Plan) -> str:
    """The page as text."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(_TEMPLATE).render(**_content(plan))


def _content(plan: Plan) -> dict[str, Any]:
    shown, topology = plan.shown, plan.topology
    capacity = float(topology.memory_bytes)
    stages = shown.memory.stages
    used = [name for name in shown.memory.fullest.parts if any(stage.parts.get(name) for stage in stages)]
    return {
        "title": f"{plan.model} on {topology.name}",
        "fits": plan.choice is not None,
        "sentence": choice_sentence(plan),
        "advice": plan.advice,
        "tiles": _tiles(plan, shown),
        "choice": _choice_table(plan, shown),
        "categories": [(name, _gib(shown.memory.fullest.parts.get(name, 0.0))) for name in used],
        "fullest": shown.memory.fullest.stage,
        "stages": [
            (stage.stage, f"{stage.bytes / GIB:.1f} GiB", drawn)
            for stage, drawn in zip(stages, memory_bars(stages, capacity, plan.budget), strict=True)
        ],
        "capacity": _gib(capacity),
        "budget": _gib(plan.budget),
        "line": step_line(shown.time),
        "parts": _parts_table(shown),
        **_pipeline(plan, shown),
        "scatter": scatter(plan.considered, plan.choice, capacity, plan.budget),
        "ways": f"{plan.ways:,}",
        "considered": f"{len(plan.considered):,}",
        "runners_up": _runners_up(plan),
        "collectives": _collectives(plan),
        "constants": _constants(plan),
        "compiled": None if plan.compiled is None else _compiled(plan.compiled.rows),
    }


def choice_sentence(plan: Plan) -> str:
    """What was chosen and what comes of it, in one sentence."""
    shown, topology = plan.shown, plan.topology
    memory = f"{shown.memory.bytes / GIB:.1f} of {topology.memory_bytes / GIB:.1f} GiB"
    if plan.choice is None:
        return (
            f"Nothing fits: of {plan.ways:,} ways to train {plan.model} on {_devices(plan)} the nearest miss, "
            f"{layout_text(shown)}, holds {memory} on its fullest device."
        )
    time = shown.time
    return (
        f"Train {plan.model} on {_devices(plan)} as {layout_text(shown)}: a step of {_count(time.tokens)} tokens takes "
        f"{seconds_text(time.seconds)}, that is {_count(time.tokens_per_s)} tokens/s at {time.mfu:.0%} MFU, and the fullest device "
        f"holds {memory}."
    )


def _devices(plan: Plan) -> str:
    topology = plan.topology
    return "one " + topology.device if topology.devices == 1 else f"{topology.devices:,} x {topology.device}"


def _tiles(plan: Plan, shown: Candidate) -> list[tuple[str, str, str]]:
    time = shown.time
    share = shown.memory.bytes / plan.topology.memory_bytes
    return [
        ("step time", seconds_text(time.seconds), f"{_count(time.tokens)} tokens"),
        ("throughput", f"{_count(time.tokens_per_s)}", "tokens/s"),
        ("MFU", f"{time.mfu:.1%}", "of the dense peak"),
        ("fullest device", f"{shown.memory.bytes / GIB:.1f} GiB", f"{share:.0%} of its memory"),
        ("communication", f"{time.exposed_share:.1%}", "of the step, exposed"),
        ("bubble", f"{time.bubble / time.seconds:.1%}", "of the step"),
    ]


def _choice_table(plan: Plan, shown: Candidate) -> Table:
    run = shown.run
    rows = [
        ("mesh", ", ".join(f"{axis} {size}" for axis, size in shown.mesh.items())),
        ("devices", f"{plan.topology.devices:,} in {plan.topology.nodes:,} node{'s' if plan.topology.nodes > 1 else ''}"),
        ("schedule", shown.schedule or "none: one stage"),
        ("microbatches", f"{run.parts:,}"),
        ("batch", f"{run.batch_size:,} rows of {run.seq_len:,} tokens"),
        ("rematerialisation", shown.remat.replace(",", ", ")),
        ("ZeRO", {0: "0: nothing sharded", 1: "1: optimiser state", 3: "3: parameters too"}[run.mesh.zero]),
        ("dispatch", str(run.moe.dispatch) if run.model.moe is not None else "no experts"),
        ("computed in", run.computed_in),
    ]
    return Table(("setting", "value"), tuple(rows))


def _parts_table(shown: Candidate) -> Table:
    total = shown.time.seconds
    rows = tuple((part.name, part.kind, seconds_text(part.seconds), f"{part.seconds / total:.1%}") for part in shown.time.parts)
    return Table(("part", "kind", "time", "share"), rows, frozenset({"time", "share"}))


def _pipeline(plan: Plan, shown: Candidate) -> dict[str, Any]:
    """The timetable whole, and its beginning where the whole is too fine to read."""
    run = shown.run
    if 2 * run.mesh.pipeline * run.pipeline.virtual_stages * run.parts > _MOST_PIECES:
        return {"timetable": None, "beginning": None, "pipeline_stages": run.mesh.pipeline}
    simulation = pipeline_simulation(run, plan.topology)
    if simulation is None:
        return {"timetable": None, "beginning": None, "pipeline_stages": 1}
    # Filling the pipeline and a few rounds of its steady state.
    filled = max(span.end for span in simulation.spans if span.microbatch == 0)
    part = min(1.0, 1.6 * filled / simulation.duration)
    beginning = (f"{part:.0%}", timetable(simulation, until=part, numbers=True)) if part < 0.7 else None
    return {
        "timetable": timetable(simulation, numbers=beginning is None),
        "beginning": beginning,
        "pipeline_stages": run.mesh.pipeline,
        "simulated_bubble": f"{simulation.bubble:.1%}",
        "chunks": run.pipeline.virtual_stages,
    }


def _runners_up(plan: Plan) -> Table:
    columns = ("mesh", "schedule", "remat", "ZeRO", "microbatches", "GiB", "step", "MFU", "why not")
    rows = []
    for other in plan.alternatives:
        figures = (f"{other.memory.bytes / GIB:.1f}", seconds_text(other.time.seconds), f"{other.time.mfu:.1%}")
        settings = (other.schedule or "none", other.remat.replace(",", ", "), str(other.run.mesh.zero), f"{other.run.parts:,}")
        rows.append((mesh_text(other), *settings, *figures, other.reason))
    return Table(columns, tuple(rows), frozenset({"ZeRO", "microbatches", "GiB", "step", "MFU"}))


def _collectives(plan: Plan) -> Table:
    rows = tuple(
        (use.kind, use.axis, str(use.devices), f"{use.count:,.0f}", _bytes(use.bytes), use.dtype, use.scope)
        for use in plan.collectives
    )
    return Table(
        ("kind", "axis", "devices", "times a step", "bytes of a device", "dtype", "mostly for"),
        rows,
        frozenset({"devices", "times a step", "bytes of a device"}),
    )


def _constants(plan: Plan) -> Table:
    topology = plan.topology
    rows = []
    for name in topology.constants:
        owner, _, field = name.partition(".")
        value: Any = getattr(topology, owner)
        if field:
            value = value[field] if owner == "flops" else getattr(value, field)
        rows.append((name, _constant(name, value), topology.sources.get(name) or "no source"))
    return Table(("constant", "value", "source"), tuple(rows), frozenset({"value"}))


def _constant(name: str, value: float) -> str:
    if name == "memory_bytes":
        return _gib(value)
    if name.startswith("flops"):
        return f"{value / 1e12:,.4g} TFLOP/s"
    if name.endswith("bandwidth"):
        return f"{value / 1e9:,.4g} GB/s"
    if name.endswith("latency"):
        return seconds_text(value)
    return f"{value:.0%}" if name.endswith("efficiency") else f"{value:,}"


def _compiled(rows: Any) -> tuple[Table, tuple[bool, ...]]:
    """The table of predicted and compiled figures, and which of its rows are far off."""
    shown = tuple((row.name, _figure(row.predicted, row.unit), _figure(row.compiled, row.unit), _difference(row)) for row in rows)
    far = tuple(row.difference is None or abs(row.difference) > _CLOSE for row in rows)
    columns = ("figure", "predicted", "compiled", "difference")
    return Table(columns, shown, frozenset(columns[1:])), far


def _difference(row: Comparison) -> str:
    return "only predicted" if row.difference is None else f"{row.difference:+.1%}"


def _figure(value: float, unit: str) -> str:
    if unit == "bytes":
        return _bytes(value)
    text = f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"
    return text if unit in ("", "count") else f"{text} {unit}"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:.1f} MiB"


def _bytes(size: float) -> str:
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power:
            return f"{size / 1024**power:,.3g} {unit}" if size < 1000 * 1024**power else f"{size / 1024**power:,.0f} {unit}"
    return f"{size:,.0f} B"


def _count(value: float) -> str:
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}" if not math.isclose(value, round(value)) else f"{value:.0f}"
