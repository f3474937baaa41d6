"""Prefill: prompts read into a key/value cache, with logits of each row's last token. B batch, T tokens, V vocabulary.

Against transformers both sides read the same prompts with the same weights, and their logits must agree.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from rich.console import Console

from benches.comparison import (
    MACHINE,
    OURS,
    RIVAL,
    Results,
    SideSpec,
    add_comparison_arguments,
    check_comparison,
    conclusion,
    figures,
    machine,
    measure,
    memory_fields,
    options_of,
    speed_table,
)
from benches.fake_devices import fake_devices
from benches.model import add_model_arguments, check_at_least, model_config, prefill_flops, random_tokens
from benches.provenance import provenance
from benches.rival import ENVIRONMENT
from ernie_jax.checkpoint import save_pretrained
from ernie_jax.config import ComputeConfig
from ernie_jax.models import TextModel, init_model, text_inputs
from ernie_jax.nn.kv_cache import KVCache

# Largest difference of two logits, relative to the largest logit.
TOLERANCE = {"float32": 2e-3, "bfloat16": 0.1}


def load() -> None:
    """Starts the backend."""
    jax.devices()


class Prefill:
    """Our side: `options` hold `config`, `dtype`, `seed`, `tokens` [B, T], and a `folder` for an export, or None."""

    parts: Sequence[str] = ("prefill",)

    def __init__(self, options: Mapping[str, Any]) -> None:
        model = init_model(options["config"], ComputeConfig(dtype=options["dtype"]), seed=options["seed"])
        if options["folder"] is not None:
            save_pretrained(model, options["folder"])
        graphdef, self._state = nnx.split(model)
        self._prefill = jax.jit(functools.partial(_prefill, graphdef))
        self._tokens = jax.numpy.asarray(options["tokens"])
        self.facts: dict[str, Any] = {"dtype": options["dtype"]}

    def run(self, part: str) -> np.ndarray:
        """One pass; returns the logits [B, V] after the last tokens."""
        logits, _ = jax.block_until_ready(self._prefill(self._state, self._tokens))
        return np.asarray(logits)


def _prefill(graphdef: Any, state: Any, tokens: jax.Array) -> tuple[jax.Array, KVCache]:
    model: TextModel = nnx.merge(graphdef, state)
    batch, length = tokens.shape
    cache = KVCache.create(model.config, batch, length, model.dtypes.compute)
    return model.next_logits(text_inputs(model.config, tokens), cache)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `bench.py prefill`."""
    add_model_arguments(parser)
    parser.add_argument("--batch-size", type=int, default=4, help="prompts read at once")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a prompt")
    add_comparison_arguments(parser, repeats=9)


def run(args: argparse.Namespace) -> dict[str, object]:
    """Measures, prints the table and returns the result.

    Raises:
      ValueError: sizes that do not fit, a comparison with what is not installed.
      RuntimeError: logits that differ.
    """
    check_at_least(vars(args), batch_size=1, tokens=1, repeats=1)
    check_comparison(args)
    config = model_config(vars(args), tokens=args.tokens)
    tokens = random_tokens(vars(args), args.batch_size, args.tokens)
    console = Console()
    console.print(f"prefill of {args.batch_size} x {args.tokens} tokens, {args.dtype}, at most {args.repeats} rounds")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "export" if args.against else None
        options = {"config": config, "dtype": args.dtype, "seed": args.seed, "tokens": tokens, "folder": folder}
        sides = {MACHINE: machine(args), OURS: SideSpec("benches.prefill:Prefill", options, fake_devices(1))}
        if args.against:
            sides[RIVAL] = SideSpec("benches.rival:Prefill", {"folder": folder, "tokens": tokens}, ENVIRONMENT)
        agreement: dict[str, float] = {}
        measured = measure(sides, args, console, lambda results: agreement.update(_agreement(results, args.dtype)))
    flops = prefill_flops(config, args.batch_size, args.tokens)
    result = figures(measured, lambda r, side: r[side]["prefill"]["seconds"], args.batch_size * args.tokens, flops)
    console.print(speed_table("prefill", result))
    console.print(conclusion(result))
    result |= {"bench": "prefill", "memory": memory_fields(measured), "agreement": agreement or None}
    return {**result, "options": options_of(args), **provenance()}


def _agreement(results: Results, dtype: str) -> dict[str, float]:
    """Largest difference of the two sides' logits over the largest logit; empty for one side."""
    if RIVAL not in results:
        return {}
    ours, theirs = (np.asarray(results[side]["prefill"][-1], np.float32) for side in (OURS, RIVAL))
    difference = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    if not difference <= TOLERANCE[dtype]:
        raise RuntimeError(
            f"the logits of {RIVAL} differ from ours by {difference:.2g} of the largest, more than {TOLERANCE[dtype]}; "
            "a bench of different computations is void"
        )
    return {"logits_difference": difference, "tolerance": TOLERANCE[dtype]}
