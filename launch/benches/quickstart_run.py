"""Runs of the recipe `configs/quickstart.py` with other settings, for the loss alone: no checkpoints, no samples."""

from __future__ import annotations

import argparse
import runpy
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ernie_jax.config import run_config_from
from ernie_jax.config.run import MeshConfig, RunConfig
from ernie_jax.train import train
from ernie_jax.train.records import read_records

RECIPE = Path(__file__).parents[2] / "configs" / "quickstart.py"


def add_run_arguments(parser: argparse.ArgumentParser, *, seeds: int) -> None:
    """Declares how long and how often the recipe is run; `seeds` is the default of `--seeds`."""
    parser.add_argument("--steps", type=int, default=300, help="optimiser steps of a run; the schedule scales with them")
    parser.add_argument("--seeds", type=int, default=seeds, help="runs of each setting, seeds 0, 1, ...")
    parser.add_argument("--last", type=int, default=20, help="mean training loss over the logged ones of so many last steps")


def check_counts(args: argparse.Namespace) -> None:
    """Refuses counts below 1.

    Raises:
      ValueError: naming the option.
    """
    for name in ("steps", "seeds", "last"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}")


def quickstart_run(settings: Mapping[str, Any], *, steps: int, seed: int, mesh: MeshConfig) -> RunConfig:
    """The recipe's run of `steps` steps on `mesh`; its schedule scales with them.

    Args:
      settings: keys of the configuration, or sections with their keys, that are set otherwise than in the recipe.
      steps: of the optimiser.
      seed: of weights and data.
      mesh: in place of the recipe's.
    """
    config = runpy.run_path(str(RECIPE))["get_config"]()
    # Before anything is checked: settings may be for this mesh alone.
    config.mesh.update(asdict(mesh))
    config.update({"steps": steps, "seed": seed, "log_every": max(1, steps // 60)})
    config.checkpoint.every = config.eval.every = 0
    config.sample.prompt = ""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            config[key].update(value)
        else:
            config[key] = value
    return run_config_from(config)


def final_losses(run: RunConfig, last: int) -> dict[str, float]:
    """Trains; mean training loss over the logged of the `last` steps, held-out loss after them, and steps that were skipped."""
    with tempfile.TemporaryDirectory() as folder:
        result = train(run, Path(folder), say=lambda line: None)
        records = read_records(Path(folder) / "metrics.jsonl")
    assert result.eval_loss is not None
    mean = statistics.fmean(record["loss"] for record in records if record["step"] > run.steps - last)
    return {"train_loss": mean, "eval_loss": result.eval_loss, "skipped_steps": result.skipped_steps}
