"""Plan a training run: mesh, schedule, remat, memory and time of a step, before any machine is rented.

python launch/plan.py ernie-4.5-300b-a47b --topology h100:512 [--global-tokens 16777216 --seq-len 4096 --json]
python launch/plan.py quickstart --topology cpu:8 --mesh data=4,expert=2 --compile
python launch/plan.py ernie-4.5-300b-a47b --topology h800:64 --serve --prompt-tokens 2048 --output-tokens 400 --time-per-token 0.05

TOPOLOGY is a name with a number of devices (a100-80, h100, h800, h200, b200, v5e, v5p, v6e, cpu; `h100:512`) or a YAML file of
one's own. Nothing is run: figures come from formulas, and with --compile from the compiler.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ernie_jax.plan.plan import Plan


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="a preset, such as ernie-4.5-300b-a47b")
    parser.add_argument("--topology", required=True, help="NAME:DEVICES, or a YAML file")
    parser.add_argument("--global-tokens", type=int, help="tokens of a step on all devices; default: 8 rows a device")
    parser.add_argument("--seq-len", type=int, help="tokens a row; default: 4096, or what the model has positions for")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16, float32, or fp8 in the experts; default: bfloat16")
    parser.add_argument("--optimizer", default="adamw", help="adamw, or adamw_ema, which keeps a running average of the weights")
    parser.add_argument("--mesh", help="sizes of some axes or all, axis=size,...; the others are searched")
    parser.add_argument("--schedule", help="of the pipeline: gpipe, 1f1b, interleaved; default: searched")
    parser.add_argument("--virtual-stages", type=int, help="of interleaved")
    parser.add_argument("--microbatches", type=int, help="parts of a step; default: searched")
    parser.add_argument("--zero", type=int, help="0, 1 or 3; default: searched")
    parser.add_argument("--remat", help="a policy by name; default: the one that computes least of those that fit")
    parser.add_argument("--dispatch", help="of experts: all_to_all, replicated, ragged; default: searched")
    parser.add_argument("--capacity-factor", type=float, help="bound on the load of an expert; default: none, nothing is dropped")
    parser.add_argument("--image-share", type=float, default=0.5, help="of a vision-language model's tokens; default: 0.5")
    parser.add_argument("--memory-budget", type=float, default=0.9, help="share of a device's memory to use; default: 0.9")
    parser.add_argument("--compile", action="store_true", help="compile the step of the plan and compare what the compiler says")
    parser.add_argument("--html", metavar="FILE", help="also write a report that a browser shows")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object, alone on the standard output")
    from ernie_jax.plan.serving_table import add_serving_arguments

    add_serving_arguments(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Say what will be done, do it, end with one line; 2 for a mistake of the user."""
    # Before jax is imported: a plan needs no accelerator.
    os.environ["JAX_PLATFORMS"] = "cpu"
    args = parse_arguments(argv)
    try:
        if args.serve:
            return serve(args)
        plan = make(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    from ernie_jax.plan.tables import summary

    print(json.dumps(plan.to_json()) if args.json else summary(plan), flush=True)
    return 0


def make(args: argparse.Namespace) -> Plan:
    """The plan that the command line asks for, with its tables printed, compiled and written where that was asked for."""
    from rich.console import Console

    from ernie_jax.plan.plan import make_plan
    from ernie_jax.plan.tables import tables

    # Into a file or a pipe the tables keep a width that holds their sentences.
    console = Console(stderr=args.json, highlight=False, width=None if sys.stdout.isatty() else 150)
    console.print(f"Plan      {args.model} on {args.topology}, {args.dtype}, {args.optimizer}", markup=False)
    start = time.perf_counter()
    plan = make_plan(args.model, args.topology, say=lambda line: console.print(f"Search    {line}", markup=False), **settings(args))
    console.print(f"Search    {len(plan.considered)} looked at closely, {time.perf_counter() - start:.1f} s")
    console.print(*tables(plan))
    if args.compile:
        plan = _compiled(plan, console)
    if args.html:
        from ernie_jax.plan.report import write_report

        write_report(plan, args.html)
        console.print(f"Wrote     {args.html}", markup=False)
    return plan


def serve(args: argparse.Namespace) -> int:
    """Print the serving plan that the command line asks for."""
    if args.compile or args.html:
        raise ValueError("--compile and --html are of training plans; leave them out with --serve, or take --json")
    from rich.console import Console

    from ernie_jax.plan.serving import plan_serving
    from ernie_jax.plan.serving_table import serving_arguments, serving_sentence, serving_table

    console = Console(stderr=args.json, highlight=False, width=None if sys.stdout.isatty() else 150)
    console.print(f"Plan      serving {args.model} on {args.topology}", markup=False)
    plan = plan_serving(args.model, args.topology, **serving_arguments(args))
    console.print(serving_table(plan))
    print(json.dumps(plan.to_json()) if args.json else serving_sentence(plan), flush=True)
    return 0


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What `make_plan` is told beside model and topology."""
    names = (
        "global_tokens", "seq_len", "dtype", "optimizer", "schedule", "virtual_stages", "microbatches", "zero", "dispatch",
        "capacity_factor", "image_share", "memory_budget",
    )  # fmt: skip
    found = {name: getattr(args, name) for name in names}
    tags = args.remat is not None and "," in args.remat and "=" not in args.remat
    return {**found, "remat": tuple(args.remat.split(",")) if tags else args.remat, "mesh": parse_mesh(args.mesh)}


def parse_mesh(text: str | None) -> dict[str, int]:
    """`data=8,expert=8` as sizes by axis.

    Raises:
      ValueError: no axis=size, or an axis twice.
    """
    sizes: dict[str, int] = {}
    for item in text.split(",") if text else ():
        axis, equals, size = (word.strip() for word in item.partition("="))
        if not equals or not size.lstrip("-").isdecimal() or axis in sizes:
            raise ValueError(f"--mesh {text}: {item!r}; expected axis=size with each axis once, as data=8,expert=8")
        sizes[axis] = int(size)
    return sizes


def _compiled(plan: Plan, console: Any) -> Plan:
    from ernie_jax.plan.proof import Proofs, prove, targets_of

    run = plan.shown.run
    if plan.choice is None:
        console.print("Compile   nothing fits: what is compiled is the nearest miss")
    proofs = []
    for target in targets_of(plan.topology):
        kind = "fake CPU devices" if target == "cpu" else f"{target} devices, without having them"
        console.print(f"Compile   lowering and compiling the step for {plan.topology.devices} {kind}", markup=False)
        proofs.append(prove(run, plan.topology, target))
        console.print(f"Compiled  {proofs[-1].sentence}", markup=False)
    return replace(plan, compiled=Proofs(tuple(proofs)))


if __name__ == "__main__":
    sys.exit(main())
