"""Pre-train a model: python launch/train.py --config=configs/quickstart.py --workdir=runs/quickstart [--config.steps=100 ...]

Goes on from the latest checkpoint in the folder, if there is one. SIGTERM and Ctrl-C save at the next step and end with 0.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from pathlib import Path

import jax
from absl import app, flags
from absl import logging as absl_logging
from ml_collections import config_flags

from ernie_jax.config import run_config_from
from ernie_jax.serve import generate
from ernie_jax.sharding import initialize_hosts
from ernie_jax.train import NonFiniteError, RunResult, train

_CONFIG = config_flags.DEFINE_config_file("config", None, "Recipe with get_config(); --config.KEY=VALUE overrides any of its keys.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run: checkpoints, metrics, export, plots.")
_JSON = flags.DEFINE_bool("json", False, "End with the result as one JSON object on the last line.")


def main(argv: list[str]) -> int:
    """Run, and say in one line what came of it; 2 for a mistake in the configuration, 1 for a run that failed."""
    # Libraries speak up from warnings on; this package also when it makes a choice. (absl resets levels as it starts.)
    absl_logging.set_verbosity(absl_logging.WARNING)
    logging.getLogger("ernie_jax").setLevel(logging.INFO)
    if len(argv) > 1:
        return _failed(f"unexpected arguments {argv[1:]}; options are --config, --config.KEY=VALUE, --workdir, --json", 2)
    initialize_hosts()
    first = jax.process_index() == 0
    try:
        run = run_config_from(_CONFIG.value)
        result = train(run, Path(_WORKDIR.value), generate=generate, say=_say if first else lambda _: None)
    except ValueError as error:
        return _failed(str(error), 2)
    except NonFiniteError as error:
        return _failed(str(error), 1)
    if first:
        print(json.dumps(dataclasses.asdict(result)) if _JSON.value else _summary(result))
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


def _failed(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr, flush=True)
    return code


def _summary(result: RunResult) -> str:
    if result.stopped:
        return f"Stopped by {result.stopped} after step {result.steps} and saved in {result.workdir}; the same command goes on"

    def figure(value: float | None) -> str:
        return "n/a" if value is None else f"{value:.4f}"

    return (
        f"Done: {result.steps} steps, loss {figure(result.loss)}, held-out {figure(result.eval_loss)} "
        f"(unigram entropy {figure(result.unigram_entropy)}); export {result.export}, plot {result.plot}"
    )


if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "workdir"])
    app.run(main)
