"""Balance of devices and nodes on a skewed stream, with experts where they began and moved every so many steps.

Every token of every layer chooses K different experts, by popularities that fall with the rank as in Zipf's law and drift from
step to step. A plan is made from the loads of one window and judged by the next, which it has not seen. The balance rate is the
mean load of a device over the largest; a step takes as long as its fullest device.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from rich.console import Console
from rich.table import Table

from benches.provenance import provenance
from ernie_jax.moe.placement import check_sizes, device_loads, plan_layers
from ernie_jax.moe.replicas import plan_replicas
from ernie_jax.train.placement_plot import plot_placement


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `bench.py placement`."""
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--chosen", type=int, default=6, help="experts a token")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--exponent", type=float, default=0.6, help="of Zipf's law: popularity is rank to the minus this")
    parser.add_argument("--drift", type=float, default=0.01, help="deviation of the change of a log popularity from step to step")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens a step")
    parser.add_argument("--every", type=int, default=10, help="steps between placements")
    parser.add_argument("--windows", type=int, default=6, help="of so many steps; the first is only planned from")
    parser.add_argument("--spare", type=int, default=2, help="slots a device beyond E / G in the plan with replicas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", default=None, help="write a picture of the last window's loads to this file")


def run(args: argparse.Namespace) -> dict[str, object]:
    """Measures, prints the table and returns the result.

    Raises:
      ValueError: sizes that make no sense.
    """
    _check(args)
    console = Console()
    console.print(
        f"{args.layers} layers of {args.experts} experts, {args.chosen} a token, on {args.devices} devices of {args.nodes} nodes; "
        f"popularity rank^-{args.exponent:g}, drift {args.drift:g} a step; {args.windows} windows of {args.every} steps of "
        f"{args.tokens} tokens"
    )
    loads = stream(args)
    began = np.tile(np.arange(args.experts), (args.layers, 1))
    places, seconds, rows = began, 0.0, []
    for window in range(1, args.windows):
        seen, ahead = loads[window - 1].sum(0), loads[window]
        start = time.perf_counter()
        new = plan_layers(seen, places, devices=args.devices, nodes=args.nodes, threshold=0.02)
        seconds += time.perf_counter() - start
        moved, places = int(np.sum(new != places)), new
        rows.append({"moved": moved, "before": _rates(ahead, began, args), "after": _rates(ahead, places, args)})
    last = loads[-1].sum(0)
    spare = args.experts // args.devices + args.spare
    replicas = [
        _rate(plan_replicas(seen, slots=spare, devices=args.devices, nodes=args.nodes).device_loads(load)[None])
        for seen, load in zip(loads[-2].sum(0), last, strict=True)
    ]
    # Every device holds equally many: at best the largest expert stands with the smallest ones.
    ranked = np.sort(last, axis=-1)
    alone = ranked[:, -1] + ranked[:, : args.experts // args.devices - 1].sum(-1)
    ceiling = float(np.mean(np.minimum(1.0, last.sum(-1) / args.devices / alone)))
    summary = {
        when: {name: float(np.mean([r[when][name] for r in rows])) for name in rows[0][when]} for when in ("before", "after")
    }
    _print(console, rows, summary)
    console.print(
        f"device balance rate {summary['before']['device']:.3f} before, {summary['after']['device']:.3f} after "
        f"(worst layer and window {min(r['after']['worst'] for r in rows):.3f}, no plan can have more than {ceiling:.3f}); "
        f"with {spare} slots a device for replicas {np.mean(replicas):.3f}; "
        f"a plan takes {seconds / len(rows) / args.layers * 1e3:.1f} ms a layer"
    )
    if args.plot:
        pair = tuple(device_loads(last, table, args.devices) for table in (began, places))
        console.print(f"picture: {plot_placement({'experts': (pair[0], pair[1])}, args.plot, title='Last window')}")
    return {
        "bench": "placement",
        "before": {name: round(value, 4) for name, value in summary["before"].items()},
        "after": {name: round(value, 4) for name, value in summary["after"].items()},
        "worst_after": round(min(r["after"]["worst"] for r in rows), 4),
        "ceiling": round(ceiling, 4),
        "replicas": round(float(np.mean(replicas)), 4),
        "moved": [r["moved"] for r in rows],
        "plan_ms_a_layer": round(seconds / len(rows) / args.layers * 1e3, 3),
        "options": {k: v for k, v in vars(args).items() if k not in ("name", "json")},
        **provenance(),
    }


def stream(args: argparse.Namespace) -> np.ndarray:
    """[windows, steps, L, E] tokens of each expert in each step."""
    rng = np.random.default_rng(args.seed)
    zipf = -args.exponent * np.log(np.arange(1, args.experts + 1))
    popularity = np.stack([rng.permutation(zipf) for _ in range(args.layers)])
    loads = np.zeros((args.windows, args.every, args.layers, args.experts))
    for window, step in np.ndindex(*loads.shape[:2]):
        popularity += args.drift * rng.normal(size=popularity.shape)
        for layer in range(args.layers):
            # The K largest of log popularity plus Gumbel noise are K draws without replacement.
            scores = popularity[layer] + rng.gumbel(size=(args.tokens, args.experts))
            chosen = np.argpartition(-scores, args.chosen - 1, axis=-1)[:, : args.chosen]
            loads[window, step, layer] = np.bincount(chosen.reshape(-1), minlength=args.experts)
    return loads


def _rates(loads: np.ndarray, places: np.ndarray, args: argparse.Namespace) -> dict[str, float]:
    """Balance rates of a window [steps, L, E]: of its sum by device and node, of the worst layer, and a mean of single steps."""
    total = loads.sum(0)
    on_device = device_loads(total, places, args.devices)
    return {
        "device": _rate(on_device),
        "node": _rate(device_loads(total, places, args.nodes)),
        "worst": min(_rate(row[None]) for row in on_device),
        "step": float(np.mean([_rate(device_loads(step, places, args.devices)) for step in loads])),
    }


def _rate(loads: np.ndarray) -> float:
    """Mean over layers of mean over largest."""
    return float(np.mean(loads.mean(-1) / np.maximum(loads.max(-1), 1e-9)))


def _print(console: Console, rows: list[dict[str, object]], summary: dict[str, dict[str, float]]) -> None:
    table = Table(title="balance rate (mean load / largest load, mean over layers)")
    headings = ("window", "experts moved", "", "devices", "worst layer", "nodes", "devices, single steps")
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left")
    for number, row in enumerate([*rows, summary | {"moved": ""}], 1):
        for when in ("before", "after"):
            rates = row[when]
            assert isinstance(rates, dict)
            first = (str(number) if number <= len(rows) else "mean", str(row["moved"])) if when == "before" else ("", "")
            table.add_row(*first, when, *(f"{rates[name]:.3f}" for name in ("device", "worst", "node", "step")))
    console.print(table)


def _check(args: argparse.Namespace) -> None:
    for name, least in (("layers", 1), ("tokens", 1), ("every", 1), ("windows", 2), ("chosen", 1), ("spare", 0)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name} must be at least {least}, got {getattr(args, name)}")
    if args.chosen > args.experts:
        raise ValueError(f"--chosen {args.chosen} of --experts {args.experts}: a token cannot choose more experts than there are")
    check_sizes(args.experts, args.devices, args.nodes)
