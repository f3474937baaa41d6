"""Bytes of the expert exchange, from the compiled program: every dispatcher in every format, on fake devices, nothing is run.

Beside what the program moves stand what the sizes of the buckets say, what must move at least (each row that has an expert on
another device, once there and once back), and what crosses between nodes.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benches.exchange_layer import Theory
from benches.fake_devices import fake_devices
from benches.provenance import provenance
from benches.workers import Worker

DISPATCHERS = ("all_to_all", "two_level", "replicated")
FORMATS = ("compute", "bfloat16", "fp8", "int8")
SKEWS = ("uniform", "zipf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `bench.py dispatch`."""
    parser.add_argument("--devices", type=int, default=8, help="of the expert axis, fake ones")
    parser.add_argument("--nodes", type=int, default=2, help="that the devices spread over")
    parser.add_argument("--tokens", type=int, default=256, help="of one device")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--experts-per-token", type=int, default=6)
    parser.add_argument("--width", type=int, default=16, help="of an expert; moves nothing")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="compute format")
    parser.add_argument("--capacity-factor", type=float, help="most load of an expert relative to the mean; none drops nothing")
    parser.add_argument("--skew", choices=SKEWS, default="uniform", help="how experts are drawn, for the rows that must move")
    parser.add_argument("--dispatch", default=",".join(DISPATCHERS), help="comma list of dispatchers")
    parser.add_argument("--exchange-dtype", default=",".join(FORMATS), help="comma list of formats of rows")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> dict[str, object]:
    """Compiles, prints the table and returns the result.

    Raises:
      ValueError: sizes that do not fit one another, an unknown dispatcher or format.
    """
    names = _check(args)
    console = Console()
    console.print(
        f"MoE layer, forward and backward, compiled for {args.devices} fake devices in {args.nodes} nodes: {args.tokens} tokens of "
        f"{args.hidden} a device, {args.experts} experts, {args.experts_per_token} chosen, {args.dtype}"
    )
    ways = {f"{dispatch} {name}": _fields(args, dispatch, name) for dispatch, name in names}
    options = vars(args) | {"ways": ways}
    with Worker("benches.exchange_layer:CompiledExchanges", options, environment=fake_devices(args.devices, cpu=True)) as worker:
        found = worker.facts
    rows, nodes_crossed = _rows_that_must_move(args)
    bucket = args.tokens
    if args.capacity_factor is not None:
        each = min(args.tokens, math.ceil(args.capacity_factor * args.tokens * args.experts_per_token / args.experts))
        bucket = min(args.tokens, each * args.experts // args.devices)
    theory = Theory(bucket, args.tokens, args.devices, args.nodes, args.hidden, args.experts, args.experts_per_token, args.dtype)
    results = [_figures(args, dispatch, name, found[f"{dispatch} {name}"], theory, rows, nodes_crossed) for dispatch, name in names]
    for result in results:
        base = next((r for r in results if r["dispatch"] == result["dispatch"] and r["format"] == "bfloat16"), None)
        result["to_bfloat16"] = None if base is None else round(result["dispatch_bytes"] / base["dispatch_bytes"], 4)
    console.print(_table(results))
    console.print(
        f"{rows / args.devices:.0f} rows a device have an expert on another device, {nodes_crossed / args.devices:.0f} pairs of a "
        "token and another node; bytes are of one device, its own bucket included, except between nodes, where they are of all"
    )
    if args.dtype == "bfloat16" and any(name == "compute" for _, name in names):
        console.print("compute: XLA:CPU moves bfloat16 as float32; other backends move half of what is shown")
    return {
        "bench": "dispatch",
        "ways": results,
        "rows_that_must_move": rows,
        "node_rows_that_must_move": nodes_crossed,
        "options": {k: v for k, v in vars(args).items() if k not in ("name", "json")},
        **provenance(),
    }


def _check(args: argparse.Namespace) -> list[tuple[str, str]]:
    """The pairs of dispatcher and format."""
    for name in ("devices", "nodes", "tokens", "hidden", "experts", "experts_per_token", "width"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    for large, small in (("devices", "nodes"), ("experts", "devices")):
        if getattr(args, large) % getattr(args, small):
            raise ValueError(f"--{small} {getattr(args, small)} does not divide --{large} {getattr(args, large)}")
    if args.experts_per_token > args.experts:
        raise ValueError(f"--experts-per-token {args.experts_per_token} is more than --experts {args.experts}; lower it")
    if args.capacity_factor is not None and not args.capacity_factor > 0:
        raise ValueError(f"--capacity-factor must be positive, got {args.capacity_factor}")
    chosen = []
    for option, known in (("dispatch", DISPATCHERS), ("exchange_dtype", FORMATS)):
        given = [name.strip() for name in getattr(args, option).split(",")]
        unknown = [name for name in given if name not in known]
        if unknown or len(set(given)) < len(given):
            raise ValueError(
                f"--{option.replace('_', '-')} {getattr(args, option)}; expected a comma list, each once, of {', '.join(known)}"
            )
        chosen.append(given)
    return [(dispatch, name) for dispatch in chosen[0] for name in chosen[1]]


def _fields(args: argparse.Namespace, dispatch: str, name: str) -> dict[str, Any]:
    return {
        "dtype": args.dtype,
        "dispatch": dispatch,
        "exchange_dtype": name,
        "expert_nodes": args.nodes if dispatch == "two_level" else None,
    }


def _rows_that_must_move(args: argparse.Namespace) -> tuple[int, int]:
    """Of all devices: pairs of a token and another device with an expert of it, and of a token and another node."""
    rng = np.random.default_rng(args.seed)
    weight = 1.0 / np.arange(1, args.experts + 1) if args.skew == "zipf" else np.ones(args.experts)
    count = args.devices * args.tokens
    # The largest of log(weight) + Gumbel noise are a draw without replacement.
    keys = np.log(weight) + rng.gumbel(size=(count, args.experts))
    index = np.argsort(-keys, axis=1)[:, : args.experts_per_token]
    home = np.repeat(np.arange(args.devices), args.tokens)

    def others(groups: int) -> int:
        of_expert, own = index // (args.experts // groups), home // (args.devices // groups)
        needed = (of_expert[..., None] == np.arange(groups)).any(1)
        return int(needed.sum() - needed[np.arange(count), own].sum())

    return others(args.devices), others(args.nodes)


def _figures(
    args: argparse.Namespace,
    dispatch: str,
    name: str,
    found: list[dict[str, Any]],
    theory: Theory,
    rows: int,
    nodes_crossed: int,
) -> dict[str, Any]:
    """The figures of one way."""
    forward = [c for c in found if not c["backward"]]
    there = sum(c["bytes"] for c in forward if c["dispatch"])
    back = sum(c["bytes"] for c in forward if not c["dispatch"])
    between = sum(c["between_nodes"] for c in forward)
    least = theory.row_bytes(name) + theory.returned(dispatch, name)
    expected = theory.dispatch(dispatch, name) + theory.back(dispatch, name)
    return {
        "dispatch": dispatch,
        "format": name,
        "collectives": found,
        "all_to_all_bytes": sorted((c["bytes"] for c in found if c["kind"] == "all-to-all"), reverse=True),
        "dispatch_bytes": there,
        "combine_bytes": back,
        "backward_bytes": sum(c["bytes"] for c in found if c["backward"]),
        "theory_bytes": expected,
        "to_theory": round((there + back) / expected, 4),
        "to_lower_bound": round((there + back) * args.devices / (rows * least), 3) if rows else None,
        "between_nodes_bytes": between,
        "between_nodes_to_lower_bound": round(between / (nodes_crossed * least), 3) if nodes_crossed else None,
    }


def _table(results: list[dict[str, Any]]) -> Table:
    table = Table(title="bytes of the exchange, forward (backward beside)")
    headings = (
        "dispatch",
        "format",
        "there",
        "to bfloat16",
        "back",
        "backward",
        "to theory",
        "to least",
        "between nodes",
        "to least",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading in headings[:2] else "right")

    def ratio(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    for r in results:
        table.add_row(
            r["dispatch"],
            r["format"],
            f"{r['dispatch_bytes']:,}",
            ratio(r["to_bfloat16"], 3),
            f"{r['combine_bytes']:,}",
            f"{r['backward_bytes']:,}",
            ratio(r["to_theory"], 3),
            ratio(r["to_lower_bound"], 2),
            f"{r['between_nodes_bytes']:,}",
            ratio(r["between_nodes_to_lower_bound"], 2),
        )
    return table
