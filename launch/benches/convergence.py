"""Cheaper communication against plain: the loss after some quickstart steps from the same weights and data, and the bytes moved.

The recipe `configs/quickstart.py` on fake devices: formats and ways of the expert exchange on a mesh of the expert axis, formats
of the sum of gradients on one of the data axis. Bytes are those that a device receives, its own part included, from the compiled
step; the body of a loop over layers is counted once, so of the exchange they are of one layer, forward and backward.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from benches.comparison import options_of
from benches.fake_devices import fake_devices
from benches.provenance import provenance
from benches.quickstart_run import RECIPE, add_run_arguments, check_counts, final_losses, quickstart_run
from benches.workers import Worker
from ernie_jax.config.run import MeshConfig, RunConfig
from ernie_jax.models import batch_shardings, run_once_options
from ernie_jax.testing import collectives
from ernie_jax.train.state import abstract_state, mesh_of, run_layout
from ernie_jax.train.step import make_train_step


@dataclass(frozen=True)
class Way:
    """One way to communicate: the axis that is as long as there are devices, and the settings."""

    axis: str
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def plain(self) -> str:
        """Name of the way that this one is held against."""
        return f"plain_{self.axis}"


def _exchange(**moe: Any) -> Way:
    return Way("expert", {"moe": moe})


def _gradients(compression: str) -> Way:
    return Way("data", {"optimizer": {"gradient_compression": compression}})


WAYS = {
    "plain_expert": Way("expert"),
    "exchange_fp8": _exchange(exchange_dtype="fp8"),
    "exchange_int8": _exchange(exchange_dtype="int8"),
    "exchange_fp8_both": _exchange(exchange_dtype="fp8", exchange_backward="fp8"),
    "two_level": _exchange(dispatch="two_level", expert_nodes=2),
    "chunks": _exchange(exchange_chunks=2),
    "plain_data": Way("data"),
    "gradients_int8": _gradients("int8"),
    "gradients_fp8": _gradients("fp8"),
    "gradients_sparse": _gradients("sparse"),
}


class Trained:
    """Side that trains when it is made: `options` are those of `quickstart_run` and `final_losses`; `facts` what came of it."""

    parts = ()

    def __init__(self, options: Mapping[str, Any]) -> None:
        way = WAYS[options["way"]]
        mesh = MeshConfig(**{way.axis: -1})
        run = quickstart_run(way.settings, steps=options["steps"], seed=options["seed"], mesh=mesh)
        self.facts: dict[str, Any] = {"bytes": _received(run) if options["seed"] == 0 else None}
        self.facts |= final_losses(run, options["last"])

    def run(self, part: str) -> None:
        """Has no parts."""


def load() -> None:
    """Starts the backend."""
    jax.devices()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `bench.py convergence`."""
    add_run_arguments(parser, seeds=1)
    parser.add_argument("--ways", default=",".join(WAYS), help="comma list; the plain ones that they need are added")
    parser.add_argument("--devices", type=int, default=8, help="fake CPU devices")


def run(args: argparse.Namespace) -> dict[str, object]:
    """Trains, prints the table and returns the result.

    Raises:
      ValueError: an unknown way, counts below 1, devices that the recipe cannot be split over.
    """
    names = _check(args)
    console = Console()
    console.print(f"{args.steps} steps of {RECIPE.name} on {args.devices} fake devices, {args.seeds} seeds: {', '.join(names)}")
    environment = fake_devices(args.devices, cpu=True)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for seed in range(args.seeds):
        for name in names:
            options = {"way": name, "steps": args.steps, "seed": seed, "last": args.last}
            with Worker("benches.convergence:Trained", options, environment=environment) as worker:
                found[name].append(worker.facts)
            losses = {kind: round(found[name][-1][kind], 4) for kind in ("train_loss", "eval_loss")}
            console.print(f"{name}, seed {seed}: {json.dumps(losses)}")
    results = {name: _figures(found[name], found[WAYS[name].plain]) for name in names}
    console.print(_table(results))
    worst = max(abs(d) for r in results.values() for each in r["differences"].values() for d in each)
    console.print(f"{len(names)} ways; no loss is further than {worst:.2%} from the plain one's")
    return {"bench": "convergence", "ways": results, "worst_difference": worst, "options": options_of(args), **provenance()}


def _check(args: argparse.Namespace) -> list[str]:
    """The ways to run, plain ones first."""
    check_counts(args)
    given = [name.strip() for name in args.ways.split(",")]
    unknown = [name for name in given if name not in WAYS]
    if unknown:
        raise ValueError(f"--ways {args.ways}: {', '.join(unknown)} unknown; expected a comma list of {', '.join(WAYS)}")
    wanted = {*given, *(WAYS[name].plain for name in given)}
    if args.devices < 2 or args.devices % 2 or 8 % args.devices:
        raise ValueError(f"--devices {args.devices}: the recipe's 8 rows are split over 2, 4 or 8 devices")
    return [name for name in WAYS if name in wanted]


def _received(run: RunConfig) -> dict[str, int]:
    """Bytes by kind of collective, of one device in the compiled step."""
    layout = run_layout(run, mesh_of(run))
    batch = {
        key: jax.ShapeDtypeStruct((run.batch_size, run.seq_len), jnp.int32) for key in batch_shardings(layout, multimodal=False)
    }
    compiled = make_train_step(run, layout).lower(abstract_state(run, layout), batch).compile(run_once_options())
    found: dict[str, int] = {}
    for each in collectives(compiled.as_text()):
        found[each.kind] = found.get(each.kind, 0) + each.bytes
    return found


def _figures(found: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    kinds = ("train_loss", "eval_loss")
    return {
        "losses": [{kind: each[kind] for kind in (*kinds, "skipped_steps")} for each in found],
        "differences": {kind: [a[kind] / b[kind] - 1 for a, b in zip(found, plain, strict=True)] for kind in kinds},
        "bytes": found[0]["bytes"],
        "bytes_to_plain": sum(found[0]["bytes"].values()) / sum(plain[0]["bytes"].values()),
    }


def _table(results: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(title="loss and bytes against the plain way of the same mesh")
    for heading in ("", "train", "held-out", "differences", "bytes of a step", "to plain"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, r in results.items():
        losses = ("/".join(f"{each[kind]:.3f}" for each in r["losses"]) for kind in ("train_loss", "eval_loss"))
        differences = ", ".join("/".join(f"{d:+.2%}" for d in each) for each in r["differences"].values())
        table.add_row(name, *losses, differences, f"{sum(r['bytes'].values()):,}", f"{r['bytes_to_plain']:.2f}")
    return table
