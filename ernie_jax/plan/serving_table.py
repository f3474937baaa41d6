"""A serving plan on the command line: its arguments, and its tables for a terminal."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from ernie_jax.plan.serving import ACTIVATIONS, ServingPlan
from ernie_jax.plan.serving_memory import KV_BITS, MEMORY_SHARE, WEIGHT_BITS
from ernie_jax.plan.serving_pool import ServingPool, shown_seconds
from ernie_jax.plan.topology import GIB


def add_serving_arguments(parser: argparse.ArgumentParser) -> None:
    """What `plan_serving` asks for, as a group of flags behind `--serve`."""
    group = parser.add_argument_group("serving (with --serve)")
    group.add_argument("--serve", action="store_true", help="plan pools that serve the model instead of a training run")
    group.add_argument("--prompt-tokens", type=int, default=2048, help="of a request (default %(default)s)")
    group.add_argument("--output-tokens", type=int, default=512, help="of its answer (default %(default)s)")
    group.add_argument("--time-to-first-token", type=float, default=2.0, metavar="S", help="target, seconds (default %(default)s)")
    group.add_argument("--time-per-token", type=float, default=0.05, metavar="S", help="target, seconds (default %(default)s)")
    group.add_argument(
        "--weight-bits",
        type=int,
        nargs="+",
        default=list(WEIGHT_BITS),
        metavar="BITS",
        help=f"widths of weights to consider, of {', '.join(map(str, WEIGHT_BITS))} (default: all)",
    )
    group.add_argument(
        "--kv-bits",
        type=int,
        nargs="+",
        default=[16, 8],
        metavar="BITS",
        help=f"widths of the cache to consider, of {', '.join(map(str, KV_BITS))} (default: 16 8)",
    )
    group.add_argument(
        "--activations", default="bfloat16", metavar="NAME", help=f"of products: {' or '.join(ACTIVATIONS)} (default %(default)s)"
    )
    group.add_argument("--requests-per-s", type=float, default=None, metavar="N", help="to serve; fills the topology by default")


def serving_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `plan_serving` that the flags of `add_serving_arguments` say."""
    return {
        "prompt_tokens": args.prompt_tokens,
        "output_tokens": args.output_tokens,
        "time_to_first_token_s": args.time_to_first_token,
        "time_per_token_s": args.time_per_token,
        "weight_bits": tuple(args.weight_bits),
        "kv_bits": tuple(args.kv_bits),
        "activations": args.activations,
        "requests_per_s": args.requests_per_s,
    }


def serving_table(plan: ServingPlan) -> RenderableType:
    """The plan for a terminal: the pools side by side, and the runners-up of each."""
    parts: list[RenderableType] = []
    pools = [pool for pool in (plan.prefill, plan.decode) if pool is not None]
    if pools:
        parts.append(_pools(plan, pools))
    for role in ("prefill", "decode"):
        if shown := plan.alternatives(role, most=5):
            parts += ["", _runners_up(role, shown)]
    return Group(*parts)


def serving_sentence(plan: ServingPlan) -> str:
    """What is served on what, or why nothing is."""
    request = plan.request
    asked = f"{plan.model} on {plan.topology.name}, prompts of {request.prompt_tokens:,} and answers of "
    asked += f"{request.output_tokens:,} tokens"
    if plan.prefill is None or plan.decode is None:
        return f"{asked}: nothing fits; {plan.reason}"
    made = (
        f"{plan.prefill_replicas} prefill x {plan.prefill.replica.devices} and {plan.decode_replicas} decode x "
        f"{plan.decode.replica.devices} devices serve {plan.requests_per_s:.3g} requests/s "
        f"({plan.requests_per_s * request.prompt_tokens:,.0f} tokens/s in, "
        f"{plan.requests_per_s * request.output_tokens:,.0f} out)"
    )
    return f"{asked}: {made}" + (f"; but {plan.reason}" if plan.reason else "")


def _pools(plan: ServingPlan, pools: list[ServingPool]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for pool in pools:
        table.add_column(pool.role, justify="right")
    room = MEMORY_SHARE * plan.topology.memory_bytes / GIB
    counts = {"prefill": plan.prefill_replicas, "decode": plan.decode_replicas}
    targets = {"prefill": plan.request.time_to_first_token_s, "decode": plan.request.time_per_token_s}

    def row(name: str, values: list[str]) -> None:
        table.add_row(name, *values)

    row("replicas x devices", [f"{counts[pool.role]} x {pool.replica.devices}" for pool in pools])
    row("tensor x expert", [f"{pool.replica.tensor} x {pool.replica.expert}" for pool in pools])
    row("bits of weights, cache", [f"{pool.replica.weight_bits}, {pool.replica.kv_bits}" for pool in pools])
    row("batch of a replica", [f"{pool.batch:,}" for pool in pools])
    row(f"GiB a device, of {room:.1f}", [f"{pool.memory.bytes / GIB:.1f}" for pool in pools])
    for part in pools[0].memory.parts:
        row(f"  {part}", [f"{pool.memory.parts[part] / GIB:.1f}" for pool in pools])
    row("latency, target", [f"{shown_seconds(pool.latency_s)}, {shown_seconds(targets[pool.role])}" for pool in pools])
    for part in pools[0].time.parts:
        row(f"  {part}", [_share(pool, part) for pool in pools])
    row("tokens/s a device", [f"{pool.tokens_per_s_per_device:,.0f}" for pool in pools])
    return table


def _share(pool: ServingPool, part: str) -> str:
    seconds = pool.time.parts.get(part, 0.0)
    bound = f" ({pool.time.bounds[part]})" if part in pool.time.bounds else ""
    return f"{seconds / pool.time.seconds:.0%}{bound}"


def _runners_up(role: str, pools: tuple[ServingPool, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(f"other {role} pools: tensor x expert")
    for name in ("bits of weights, cache", "batch", "tokens/s a device"):
        table.add_column(name, justify="right")
    table.add_column("why not")
    for pool in pools:
        cut = pool.replica
        bits, rate = f"{cut.weight_bits}, {cut.kv_bits}", f"{pool.tokens_per_s_per_device:,.0f}"
        table.add_row(f"{cut.tensor} x {cut.expert}", bits, f"{pool.batch:,}", rate, pool.reason)
    return table
