"""Draw the metrics of several runs in one picture.

python launch/compare.py --runs runs/plain runs/orthogonal --metrics router.gate_cosine vision_router.gate_cosine --out compare.png
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", required=True, help="folders of runs, each with its metrics.jsonl")
    parser.add_argument("--metrics", nargs="+", default=["loss"], help="keys of the records, section.key for those in a section")
    parser.add_argument("--out", default="compare.png", help="PNG to write")
    parser.add_argument("--json", action="store_true", help="print the last values as one JSON object on the last line")
    return parser.parse_args()


def main() -> None:
    """Read, draw, tell the last values."""
    args = parse_arguments()
    from ernie_jax.train.plots import metric_of, plot_comparison
    from ernie_jax.train.records import read_records

    runs = {folder: read_records(Path(folder) / "metrics.jsonl") for folder in args.runs}
    for folder, records in runs.items():
        if not records:
            raise ValueError(f"{Path(folder) / 'metrics.jsonl'} has no record; give the folder of a run that has logged a step")
    path = plot_comparison(runs, args.metrics, args.out)
    last = {folder: {metric: metric_of(records[-1], metric) for metric in args.metrics} for folder, records in runs.items()}
    for folder, values in last.items():
        shown = ", ".join(f"{metric} {value:.4f}" for metric, value in values.items() if value is not None)
        print(f"{folder} at step {runs[folder][-1]['step']}: {shown}")
    print(json.dumps({"picture": str(path), "last": last}) if args.json else f"{len(runs)} runs drawn in {path}")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
