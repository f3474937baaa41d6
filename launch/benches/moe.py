"""Grouped matmuls of the experts, forward and backward, against the dense matmul of equal FLOPs in the same run.

R rows, E experts, D hidden size, F expert width. Two products: gate and up fused [R, D] x [E, D, 2F], down [R, F] x [E, F, D].

With `--vision-fraction` a share of the tokens goes to a second set of experts, of a width of its own, in the same pass: the rows
of the second set stand behind those of the first, and each set's products run over its own rows alone, as in
`ernie_jax.moe.expert_exchange`. It is measured against dense matmuls of equal FLOPs and against the first set with all tokens.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benches.interleaved import interleave, median_ratio
from benches.provenance import provenance
from ernie_jax.moe.grouped_matmul import AUTO, backends_on, grouped_matmul

SKEWS: dict[str, Callable[[int], np.ndarray]] = {
    "uniform": lambda experts: np.full(experts, 1 / experts),
    "zipf": lambda experts: (1 / np.arange(1, experts + 1)) / (1 / np.arange(1, experts + 1)).sum(),
    "one": lambda experts: np.eye(experts)[0],
}
DTYPES = ("float32", "bfloat16")
DENSE = "one dense matmul"
TEXT_ONLY = "text experts for all"


@dataclass(frozen=True)
class ExpertSet:
    """The experts of one modality: their width F, and how many rows each is given, [E]."""

    width: int
    sizes: np.ndarray

    @property
    def rows(self) -> int:
        """Rows of them all."""
        return int(self.sizes.sum())

    def flops(self, hidden: int) -> int:
        """Of both products, forward and (twice that) backward."""
        return 3 * 2 * self.rows * 3 * hidden * self.width


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `bench.py moe`."""
    parser.add_argument("--hidden", type=int, default=512, help="hidden size D")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--experts-per-token", type=int, default=4)
    parser.add_argument("--width", type=int, default=256, help="expert width F")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vision-fraction", type=float, help="share of tokens that go to vision experts; none without it")
    parser.add_argument(
        "--vision-width", type=int, help="width of the vision experts; a third of --width, at least 8, if not given"
    )
    parser.add_argument("--skew", choices=SKEWS, default="uniform", help="how rows are drawn over the experts")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--repeats", type=int, default=9, help="most rounds; the figures are medians over them")
    parser.add_argument(
        "--max-seconds", type=float, default=35.0, help="start no further round after this long, once three are done"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--all-backends", action="store_true", help="also the others, one round each (minutes on CPU)")


def run(args: argparse.Namespace) -> dict[str, object]:
    """Measures, prints the table and returns the result.

    Raises:
      ValueError: a size below 1, or more experts a token than there are.
    """
    _check(args)
    console = Console()
    default = AUTO[jax.default_backend()]
    sets = _sets(args, args.vision_fraction)
    flops = sum(one.flops(args.hidden) for one in sets)
    for one in sets:
        console.print(
            f"{one.rows} rows over {args.experts} experts ({args.skew}: {one.sizes.min()} to {one.sizes.max()} an expert), "
            f"{args.dtype}: [{args.hidden}, {2 * one.width}] and [{one.width}, {args.hidden}]"
        )
    console.print(f"forward and backward, {flops / 1e9:.1f} GFLOP, at most {args.repeats} rounds")
    calls = _calls(args, sets)
    measured = {name: calls[name] for name in (DENSE, TEXT_ONLY, default) if name in calls}
    rounds = {default: _measure(console, measured, args.repeats, args.max_seconds)}
    if args.all_backends:
        for name in set(backends_on(jax.default_backend())) - {default}:
            rounds[name] = _measure(console, {DENSE: calls[DENSE], name: calls[name]}, 1)
    ratios = {name: round(median_ratio(r, name, DENSE), 3) for name, r in rounds.items()}
    seconds = {name: statistics.median(r[name] for r in rounds[default]) for name in measured if name != default}
    seconds |= {name: statistics.median(r[name] for r in of_backend) for name, of_backend in rounds.items()}
    text_only = _sets(args, None)[0].flops(args.hidden)
    flops_of = {name: text_only if name == TEXT_ONLY else flops for name in seconds}
    console.print(_table(seconds, ratios, flops_of, default))
    console.print(
        f"{default}: {ratios[default]:.2f} times the dense matmul of equal FLOPs, median of {len(rounds[default])} rounds"
    )
    mixture: dict[str, object] = {}
    if TEXT_ONLY in measured:
        to_text_only = round(median_ratio(rounds[default], default, TEXT_ONLY), 3)
        expected = flops / text_only
        console.print(f"{default}: {to_text_only:.2f} times the text experts with all tokens; of the FLOPs {expected:.2f}")
        mixture = {"ratio_to_text_only": to_text_only, "expected_ratio": round(expected, 4), "rows": [one.rows for one in sets]}
    options = {k: v for k, v in vars(args).items() if k not in ("name", "json", "all_backends")}
    return {
        "bench": "moe",
        "ratio_to_dense": ratios[default],
        **mixture,
        "backend": default,
        "ratios": ratios,
        "rounds": len(rounds[default]),
        "seconds": {name: round(s, 5) for name, s in seconds.items()},
        "ratio_quartiles": _quartiles([r[default] / r[DENSE] for r in rounds[default]]),
        "flops": flops,
        "options": options,
        **provenance(),
    }


def _check(args: argparse.Namespace) -> None:
    for name in ("hidden", "experts", "experts_per_token", "width", "tokens", "repeats"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.experts_per_token > args.experts:
        raise ValueError(f"--experts-per-token {args.experts_per_token} is more than --experts {args.experts}; lower it")
    if args.vision_fraction is None and args.vision_width is not None:
        raise ValueError("--vision-width is given without --vision-fraction; say which share of the tokens is vision's")
    if args.vision_fraction is not None and not 0 <= args.vision_fraction <= 1:
        raise ValueError(f"--vision-fraction must be between 0 and 1, got {args.vision_fraction}")
    if args.vision_width is None:
        args.vision_width = None if args.vision_fraction is None else max(8, args.width // 3)
    elif args.vision_width < 1:
        raise ValueError(f"--vision-width must be at least 1, got {args.vision_width}")


def _sets(args: argparse.Namespace, fraction: float | None) -> list[ExpertSet]:
    """The text experts, and behind them the vision experts where there is a fraction of the tokens for them."""
    rng = np.random.default_rng(args.seed)
    vision = 0 if fraction is None else round(fraction * args.tokens)
    shares = [(args.tokens - vision, args.width)] + ([] if fraction is None else [(vision, args.vision_width)])
    drawn = SKEWS[args.skew](args.experts)
    return [ExpertSet(width, rng.multinomial(tokens * args.experts_per_token, drawn)) for tokens, width in shares]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Operands:
    """What one set multiplies: rows before gate and up [R, D] and before down [R, F], weights [E, D, 2F] and [E, F, D],
    cotangents [R, 2F] and [R, D]; of the grouped products R is all rows, of the dense ones the set's, and there is no E."""

    rows: tuple[jax.Array, jax.Array]
    weights: tuple[jax.Array, jax.Array]
    cotangents: tuple[jax.Array, jax.Array]


def _operands(args: argparse.Namespace, sets: Sequence[ExpertSet], num_rows: int) -> list[Operands]:
    """Of each set; the sets share the rows before gate and up and the cotangent after down."""
    dtype = jnp.dtype(args.dtype)
    keys = iter(jax.random.split(jax.random.key(args.seed), 2 + 4 * len(sets)))

    def random(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, dtype)

    rows, cotangent = random(num_rows, args.hidden), random(num_rows, args.hidden)
    return [
        Operands(
            (rows, random(num_rows, one.width)),
            (
                random(args.experts, args.hidden, 2 * one.width) / args.hidden**0.5,
                random(args.experts, one.width, args.hidden) / one.width**0.5,
            ),
            (random(num_rows, 2 * one.width), cotangent),
        )
        for one in sets
    ]


def _grouped_step(operands: list[Operands], sizes: list[jax.Array], backend: str) -> object:
    """Both products of all sets with their backward, as `moe.expert_exchange` takes them."""
    before = [None, *(sum(s.sum() for s in sizes[:i]) for i in range(1, len(sizes)))]
    products = [
        functools.partial(grouped_matmul, group_sizes=own, backend=backend, first_row=first, sets=len(sizes))
        for own, first in zip(sizes, before, strict=True)
    ]

    def up(rows: jax.Array, weights: list[jax.Array]) -> list[jax.Array]:
        return [product(rows, w) for product, w in zip(products, weights, strict=True)]

    def down(hidden: list[jax.Array], weights: list[jax.Array]) -> jax.Array:
        # Rows of another set are zero in each.
        return functools.reduce(jnp.add, [product(h, w) for product, h, w in zip(products, hidden, weights, strict=True)])

    out, pullback = jax.vjp(up, operands[0].rows[0], [o.weights[0] for o in operands])
    result, second = jax.vjp(down, [o.rows[1] for o in operands], [o.weights[1] for o in operands])
    return out, pullback([o.cotangents[0] for o in operands]), result, second(operands[0].cotangents[1])


def _dense_step(operands: list[Operands]) -> object:
    """Plain products of the same number of rows and the same widths."""
    results = []
    for one in operands:
        for rows, weights, cotangent in zip(one.rows, one.weights, one.cotangents, strict=True):
            out, pullback = jax.vjp(jnp.matmul, rows, weights)
            results.append((out, *pullback(cotangent)))
    return results


def _calls(args: argparse.Namespace, sets: Sequence[ExpertSet]) -> dict[str, Callable[[], object]]:
    """Name -> a call of both products of all sets with their backward: the dense one, each backend, and text alone."""
    num_rows = sum(one.rows for one in sets)
    operands = _operands(args, sets, num_rows)
    # Dense products of each set's own rows with the weights of one expert.
    dense = [
        Operands(tuple(a[: one.rows] for a in o.rows), tuple(a[0] for a in o.weights), tuple(a[: one.rows] for a in o.cotangents))
        for one, o in zip(sets, operands, strict=True)
    ]
    # Group sizes are an argument: as a constant the compiler could unroll the loops for these very sizes.
    sizes = [jnp.asarray(one.sizes, jnp.int32) for one in sets]
    calls: dict[str, Callable[[], object]] = {DENSE: functools.partial(jax.jit(_dense_step), dense)}
    steps = {name: jax.jit(functools.partial(_grouped_step, backend=name)) for name in backends_on(jax.default_backend())}
    if len(sets) > 1:
        all_rows = [jnp.asarray(_sets(args, None)[0].sizes, jnp.int32)]
        calls[TEXT_ONLY] = functools.partial(steps[AUTO[jax.default_backend()]], operands[:1], all_rows)
    return calls | {name: functools.partial(step, operands, sizes) for name, step in steps.items()}


def _measure(
    console: Console, calls: dict[str, Callable[[], object]], repeats: int, max_seconds: float = float("inf")
) -> list[dict[str, float]]:
    rounds = interleave(calls, repeats, max_seconds)
    if not console.is_terminal:
        return list(rounds)
    return list(track(rounds, total=repeats, description=" / ".join(calls), console=console, transient=True))


def _quartiles(values: list[float]) -> list[float]:
    return [round(float(q), 3) for q in np.quantile(values, [0.25, 0.75])]


def _table(seconds: dict[str, float], ratios: dict[str, float], flops: dict[str, int], default: str) -> Table:
    table = Table(title="forward + backward of both products")
    for heading in ("", "ms", "GFLOP/s", "ratio to dense"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, median in seconds.items():
        label = f"{name} (default here)" if name == default else name
        # Of other FLOPs there is no such ratio.
        ratio = f"{ratios[name]:.2f}" if name in ratios else ("1" if name == DENSE else "")
        table.add_row(label, f"{median * 1e3:.1f}", f"{flops[name] / median / 1e9:.1f}", ratio)
    return table
