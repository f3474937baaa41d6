"""Benchmarks by name: `python launch/bench.py NAME --help`.

Each prints what it will do, then a table; with `--json` the last line is the result as one JSON object, with the
hardware, the versions, the commit and the command that gave it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence

# name -> what it measures; the code is benches/NAME.py with `add_arguments(parser)` and `run(args) -> dict`.
BENCHES = {
    "moe": "grouped matmuls of the experts against the dense matmul of equal FLOPs",
    "dispatch": "bytes of the expert exchange in the compiled program, by dispatcher and format, against what must move",
    "compile": "compile time of a deep training step against a shallow one of the same layers",
    "train": "training step: tokens/s, MFU, memory; against transformers, or on meshes of fake devices with shares of collectives",
    "remat": "bytes kept and FLOPs computed again under each rematerialisation policy, beside the prediction",
    "prefill": "prompts read into a cache: tokens/s, MFU; against transformers",
    "decode": "greedy generation: tokens/s, share of memory bandwidth; against transformers",
    "pipeline": "schedules side by side: memory against microbatches, ticks and bubble against the simulator, time",
    "scaling": "step time against tokens, experts, layers, vocabulary and sequence, with fitted exponents",
    "placement": "balance of devices and nodes before and after experts are moved, on a skewed, drifting stream",
    "precision": "FP8 against bfloat16: loss after some quickstart steps, memory of the compiled step",
    "convergence": "rounded, sparse and two-level communication against plain: loss after some quickstart steps, bytes of a step",
    "plan": "the planner's choice against running it and others of its candidates on fake devices",
    "device": "the whole set on one GPU: training, prefill, decoding, grouped matmuls; MFU and share of memory bandwidth",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the bench named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    modules = {}
    for name, summary in BENCHES.items():
        command = commands.add_parser(name, help=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        command.add_argument("--json", action="store_true", help="print the result as one JSON object on the last line")
        modules[name] = importlib.import_module(f"benches.{name}")
        modules[name].add_arguments(command)
    args = parser.parse_args(argv)
    try:
        result = modules[args.name].run(args)
    except ValueError as error:
        parser.error(str(error))
    if args.json:
        print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
