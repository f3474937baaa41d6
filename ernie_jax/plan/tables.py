"""A plan as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from ernie_jax.plan.candidate import Candidate, mesh_text
from ernie_jax.plan.plan import Plan
from ernie_jax.plan.topology import GIB

_MOST_STAGES = 4
_MOST_COLLECTIVES = 12


def tables(plan: Plan) -> list[Table]:
    """The choice (or the nearest miss), its memory, time and collectives, and the runners-up with the reasons why they lost."""
    shown = plan.shown
    return [_choice(plan, shown), _memory(plan, shown), _time(shown), _collectives(plan), _alternatives(plan)]


def summary(plan: Plan) -> str:
    """One line: what was chosen and what it gives, or what would make the model fit."""
    shown = plan.shown
    where = f"{plan.model} on {plan.topology.name}"
    if plan.choice is None:
        return f"{where}: nothing fits; {plan.advice}"
    time = shown.time
    return (
        f"{where}: {mesh_text(shown)}, {settings_text(shown)}: {shown.memory_gib:.1f} GiB a device, "
        f"{seconds_text(time.seconds)} a step, {time.tokens_per_s:,.0f} tokens/s, MFU {time.mfu:.1%}"
    )


def settings_text(candidate: Candidate) -> str:
    """Schedule, microbatches, ZeRO, dispatcher and remat policy in a few words."""
    run = candidate.run
    parts = [candidate.schedule] if candidate.schedule else []
    parts += [f"{run.parts} microbatches" if run.parts > 1 else "1 microbatch", f"ZeRO {run.mesh.zero}"]
    parts += [run.moe.dispatch] if run.mesh.expert > 1 else []
    return ", ".join([*parts, f"remat {candidate.remat}"])


def seconds_text(seconds: float) -> str:
    """With a unit that suits: 12.3 s, 45.6 ms."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left")
    return table


def _choice(plan: Plan, shown: Candidate) -> Table:
    table = Table(title="the plan" if plan.choice else "nothing fits: the nearest miss", title_justify="left", show_header=False)
    time, run = shown.time, shown.run
    rows: Iterable[tuple[str, str]] = (
        ("mesh", mesh_text(shown)),
        ("settings", settings_text(shown)),
        ("batch", f"{run.batch_size:,} x {run.seq_len:,} tokens, {run.computed_in}"),
        ("memory", f"{shown.memory_gib:.1f} GiB of {plan.budget / GIB:.1f} a device"),
        ("step", f"{seconds_text(time.seconds)}, {time.tokens_per_s:,.0f} tokens/s"),
        ("MFU", f"{time.mfu:.1%}; exposed communication {time.exposed_share:.1%}, bubble {time.bubble / time.seconds:.1%}"),
    )
    for row in rows:
        table.add_row(*row)
    return table


def _memory(plan: Plan, shown: Candidate) -> Table:
    stages = shown.memory.stages
    some = stages if len(stages) <= _MOST_STAGES else (stages[0], stages[1], stages[-1])
    fullest = shown.memory.fullest
    headings = ["fullest", *(f"stage {s.stage}" for s in some)] if len(stages) > 1 else ["GiB"]
    table = _table("memory of a device, GiB", "", *headings)
    columns = [fullest, *some] if len(stages) > 1 else [fullest]
    for name in fullest.parts:
        table.add_row(name, *(f"{column.parts.get(name, 0.0) / GIB:.2f}" for column in columns))
    table.add_section()
    table.add_row("all", *(f"{column.bytes / GIB:.2f}" for column in columns))
    return table


def _time(shown: Candidate) -> Table:
    table = _table("time of a step on a device", "", "", "seconds", "share")
    for part in shown.time.parts:
        share = "" if part.kind == "hidden" else f"{part.seconds / shown.time.seconds:.1%}"
        table.add_row(part.name, part.kind, f"{part.seconds:.4g}", share)
    table.add_section()
    table.add_row("all", "", f"{shown.time.seconds:.4g}", "100%")
    return table


def _collectives(plan: Plan) -> Table:
    table = _table("collectives of a step on a device", "kind", "axes", "GB", "count", "format")
    for use in plan.collectives[:_MOST_COLLECTIVES]:
        table.add_row(use.kind, use.axis, f"{use.bytes / 1e9:.4g}", f"{use.count:,.0f}", use.dtype)
    rest = plan.collectives[_MOST_COLLECTIVES:]
    if rest:
        size, count = sum(use.bytes for use in rest), sum(use.count for use in rest)
        table.add_row(f"{len(rest)} more", "", f"{size / 1e9:.4g}", f"{count:,.0f}", "")
    return table


def _alternatives(plan: Plan) -> Table:
    others = plan.alternatives if plan.choice else plan.alternatives[1:]
    table = _table(f"{len(others)} others of {plan.ways:,} ways ({len(plan.considered)} looked at closely)")
    for heading in ("mesh", "settings"):
        table.add_column(heading)
    for heading in ("GiB", "step", "MFU"):
        table.add_column(heading, justify="right")
    table.add_column("why not")
    for other in others:
        figures = f"{other.memory_gib:.1f}", seconds_text(other.time.seconds), f"{other.time.mfu:.1%}"
        table.add_row(mesh_text(other), settings_text(other), *figures, other.reason)
    return table
