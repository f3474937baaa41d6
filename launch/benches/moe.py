"""Grouped matmuls of the experts, forward and backward, against the dense matmul of equal FLOPs in the same run.

R rows, E experts, D hidden size, F expert width. Two products: gate and up fused [R, D] x [E, D, 2F], down [R, F] x [E, F, D].
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Iterable

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
Product = Callable[[jax.Array, jax.Array], jax.Array]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `bench.py moe`."""
    parser.add_argument("--hidden", type=int, default=512, help="hidden size D")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--experts-per-token", type=int, default=4)
    parser.add_argument("--width", type=int, default=256, help="expert width F")
    parser.add_argument("--tokens", type=int, default=4096)
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
    num_rows = args.tokens * args.experts_per_token
    flops = 3 * 2 * num_rows * 3 * args.hidden * args.width
    sizes = np.random.default_rng(args.seed).multinomial(num_rows, SKEWS[args.skew](args.experts))
    console.print(
        f"{num_rows} rows over {args.experts} experts ({args.skew}: {sizes.min()} to {sizes.max()} an expert), {args.dtype}: "
        f"[{args.hidden}, {2 * args.width}] and [{args.width}, {args.hidden}] forward and backward, {flops / 1e9:.1f} GFLOP, "
        f"at most {args.repeats} rounds"
    )
    calls = _calls(args, num_rows, jnp.asarray(sizes, jnp.int32))
    rounds = {default: _measure(console, {DENSE: calls[DENSE], default: calls[default]}, args.repeats, args.max_seconds)}
    if args.all_backends:
        for name in set(backends_on(jax.default_backend())) - {default}:
            rounds[name] = _measure(console, {DENSE: calls[DENSE], name: calls[name]}, 1)
    ratios = {name: round(median_ratio(r, name, DENSE), 3) for name, r in rounds.items()}
    seconds = {name: statistics.median(r[name] for r in measured) for name, measured in rounds.items()}
    seconds = {DENSE: statistics.median(r[DENSE] for r in rounds[default]), **seconds}
    console.print(_table(seconds, ratios, flops, default))
    console.print(
        f"{default}: {ratios[default]:.2f} times the dense matmul of equal FLOPs, median of {len(rounds[default])} rounds"
    )
    options = {k: v for k, v in vars(args).items() if k not in ("name", "json", "all_backends")}
    return {
        "bench": "moe",
        "ratio_to_dense": ratios[default],
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


def _calls(args: argparse.Namespace, num_rows: int, sizes: jax.Array) -> dict[str, Callable[[], object]]:
    """Name -> a call of both products with their backward: the dense one and each backend."""
    dtype = jnp.dtype(args.dtype)
    keys = iter(jax.random.split(jax.random.key(args.seed), 6))
    shapes = ((args.hidden, 2 * args.width), (args.width, args.hidden))
    grouped, dense = [], []
    for inner, outer in shapes:
        rows = jax.random.normal(next(keys), (num_rows, inner), dtype)
        weights = jax.random.normal(next(keys), (args.experts, inner, outer), dtype) / inner**0.5
        cotangent = jax.random.normal(next(keys), (num_rows, outer), dtype)
        grouped.append((rows, weights, cotangent))
        dense.append((rows, weights[0], cotangent))

    def forward_and_backward(product: Product, layers: Iterable[tuple[jax.Array, ...]]) -> list[tuple[jax.Array, ...]]:
        results = []
        for rows, weights, cotangent in layers:
            out, pullback = jax.vjp(product, rows, weights)
            results.append((out, *pullback(cotangent)))
        return results

    # Group sizes are an argument: as a constant the compiler could unroll the loops for these very sizes.
    def grouped_step(layers: list[tuple[jax.Array, ...]], sizes: jax.Array, backend: str) -> list[tuple[jax.Array, ...]]:
        return forward_and_backward(functools.partial(grouped_matmul, group_sizes=sizes, backend=backend), layers)

    dense_step = jax.jit(functools.partial(forward_and_backward, jnp.matmul))
    calls: dict[str, Callable[[], object]] = {DENSE: functools.partial(dense_step, dense)}
    for name in backends_on(jax.default_backend()):
        calls[name] = functools.partial(jax.jit(functools.partial(grouped_step, backend=name)), grouped, sizes)
    return calls


def _measure(
    console: Console, calls: dict[str, Callable[[], object]], repeats: int, max_seconds: float = float("inf")
) -> list[dict[str, float]]:
    rounds = interleave(calls, repeats, max_seconds)
    if not console.is_terminal:
        return list(rounds)
    return list(track(rounds, total=repeats, description=" / ".join(calls), console=console, transient=True))


def _quartiles(values: list[float]) -> list[float]:
    return [round(float(q), 3) for q in np.quantile(values, [0.25, 0.75])]


def _table(seconds: dict[str, float], ratios: dict[str, float], flops: int, default: str) -> Table:
    table = Table(title="forward + backward of both products")
    for heading in ("", "ms", "GFLOP/s", "ratio to dense"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, median in seconds.items():
        label = f"{name} (default here)" if name == default else name
        ratio = f"{ratios[name]:.2f}" if name in ratios else "1"
        table.add_row(label, f"{median * 1e3:.1f}", f"{flops / median / 1e9:.1f}", ratio)
    return table
