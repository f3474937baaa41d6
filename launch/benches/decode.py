"""Decoding: new tokens a second after a prompt, greedy, one row or several. B batch, P prompt tokens, N new tokens.

A side generates 1 token and N tokens after the same prompts, in turns; decoding is the difference: B (N - 1) tokens in the time
of the second less that of the first, so that reading the prompt and starting up count for neither side. The rate of the
whole call is reported beside it. Against transformers the tokens must agree.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from benches.comparison import (
    MACHINE,
    OURS,
    RIVAL,
    Measured,
    Results,
    Round,
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
from benches.model import (
    BYTES,
    add_model_arguments,
    check_at_least,
    decode_flops,
    decode_weights,
    model_config,
    random_tokens,
)
from benches.provenance import provenance
from benches.rival import ENVIRONMENT
from ernie_jax.checkpoint import save_pretrained
from ernie_jax.config import ComputeConfig
from ernie_jax.models import init_model
from ernie_jax.serve import generate_tokens

# Least share of a row's new tokens before the first that differs, over all rows. A near tie may turn a row in float32; in
# bfloat16 rows part soon, so only half of the first tokens are asked for.
AGREEMENT = {"float32": 0.9, "bfloat16": 0.5}


def load() -> None:
    """Starts the backend."""
    jax.devices()


class Decode:
    """Our side: `options` hold `config`, `dtype`, `seed`, `tokens` [B, P], `new`, and a `folder` for an export, or None."""

    parts: Sequence[str] = ("first", "all")

    def __init__(self, options: Mapping[str, Any]) -> None:
        # Weights are held in the format they are used in, as one would to serve.
        compute = ComputeConfig(dtype=options["dtype"], param_dtype=options["dtype"])
        self._model = init_model(options["config"], compute, seed=options["seed"])
        if options["folder"] is not None:
            save_pretrained(self._model, options["folder"])
        self._prompts = options["tokens"].tolist()
        self._lengths = {"first": 1, "all": int(options["new"])}
        self.facts: dict[str, Any] = {"dtype": options["dtype"]}

    def run(self, part: str) -> np.ndarray:
        """One call of the library's generation, which no token stops; returns the new tokens [B, n]."""
        completions = generate_tokens(self._model, self._prompts, max_new_tokens=self._lengths[part], stop_token_ids=[])
        return np.array([completion.token_ids for completion in completions])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `bench.py decode`."""
    add_model_arguments(parser)
    parser.add_argument("--batch-size", type=int, default=1, help="rows generated at once")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="new tokens of a row")
    add_comparison_arguments(parser, repeats=9)


def run(args: argparse.Namespace) -> dict[str, object]:
    """Measures, prints the table and returns the result.

    Raises:
      ValueError: sizes that do not fit, a comparison with what is not installed.
      RuntimeError: tokens that differ, or too few to be timed.
    """
    check_at_least(vars(args), batch_size=1, prompt=1, new=2, repeats=1)
    check_comparison(args)
    config = model_config(vars(args), tokens=args.prompt + args.new)
    tokens = random_tokens(vars(args), args.batch_size, args.prompt)
    console = Console()
    console.print(
        f"greedy decoding of {args.batch_size} x {args.new} tokens after {args.prompt}, {args.dtype}, at most {args.repeats} "
        "rounds; tokens/s are those after the first token"
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "export" if args.against else None
        common = {"tokens": tokens, "new": args.new, "folder": folder}
        options = {"config": config, "dtype": args.dtype, "seed": args.seed, **common}
        sides = {MACHINE: machine(args), OURS: SideSpec("benches.decode:Decode", options, fake_devices(1))}
        if args.against:
            sides[RIVAL] = SideSpec("benches.rival:Decode", common, ENVIRONMENT)
        agreement: dict[str, float] = {}
        measured = measure(sides, args, console, lambda results: agreement.update(_agreement(results, args.dtype)))
    steps = args.new - 1
    flops = steps * decode_flops(config, args.batch_size, args.prompt + args.new / 2)
    result = figures(measured, _seconds_of, args.batch_size * steps, flops)
    weights = decode_weights(config, args.batch_size)
    shares = {}
    for name, speed, size in ((OURS, result, BYTES[args.dtype]), (RIVAL, result[RIVAL], BYTES["float32"])):
        if speed is not None:
            # Every step reads its weights once; the cache is left out.
            shares[name] = round(weights * size * steps / speed["seconds"] / measured.bandwidth, 4)
            speed |= {"bandwidth_share": shares[name], **_whole_call(measured, name, args.batch_size * args.new)}
    columns = {side: f"{share:.0%}" for side, share in shares.items()}
    console.print(speed_table("decoding", result, memory_bandwidth=columns))
    console.print(conclusion(result))
    result |= {"bench": "decode", "memory": memory_fields(measured), "agreement": agreement or None}
    return {**result, "weights_bytes_a_step": weights * BYTES[args.dtype], "options": options_of(args), **provenance()}


def _seconds_of(turn: Round, side: str) -> float:
    return turn[side]["all"]["seconds"] - turn[side]["first"]["seconds"]


def _whole_call(measured: Measured, side: str, tokens: int) -> dict[str, float]:
    """Medians of the calls themselves: seconds to the first token, seconds in all, and the rate of all with the prompt's time."""
    first, whole = (statistics.median(r[side][part]["seconds"] for r in measured.rounds) for part in ("first", "all"))
    return {"first_token_seconds": first, "call_seconds": whole, "call_tokens_per_s": tokens / whole}


def _agreement(results: Results, dtype: str) -> dict[str, float]:
    """Shares of the new tokens before a row's first difference, and of equal first tokens; empty for one side."""
    if RIVAL not in results:
        return {}
    ours, theirs = (np.asarray(results[side]["all"][-1]) for side in (OURS, RIVAL))
    if ours.shape != theirs.shape:
        raise RuntimeError(f"{RIVAL} made tokens {theirs.shape}, ours are {ours.shape}; a bench of different computations is void")
    same = np.logical_and.accumulate(ours == theirs, axis=1)
    shares = {"tokens": float(same.mean()), "first_tokens": float(same[:, 0].mean())}
    if shares["tokens" if dtype == "float32" else "first_tokens"] < AGREEMENT[dtype]:
        raise RuntimeError(
            f"{RIVAL} continues the prompts otherwise: {shares['tokens']:.0%} of the new tokens and "
            f"{shares['first_tokens']:.0%} of the first ones are the same; a bench of different computations is void"
        )
    return shares
