"""The whole set on one accelerator, in under six minutes on a GPU of 80 GB or more: training step, prefill, decoding and the
experts' products, beside what the same device reaches in a plain matrix product and in reading memory.

One process, one phase after another, each phase's arrays freed before the next. B batch, T tokens, P prompt, N new tokens.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from benches.decode import Decode
from benches.device_presets import PRESETS, Preset, check_device
from benches.device_products import DENSE, product_calls
from benches.interleaved import interleave, median_ratio
from benches.machine import Machine
from benches.model import BYTES, decode_flops, decode_weights, model_config, prefill_flops, random_tokens, run_config, train_flops
from benches.prefill import Prefill
from benches.provenance import provenance
from benches.train import Step
from benches.workers import Side
from ernie_jax.config import ComputeConfig
from ernie_jax.config.parameters import count_parameters
from ernie_jax.moe.grouped_matmul import AUTO
from ernie_jax.nn.attention_kernels import choose_implementation
from ernie_jax.train.flops import PEAK_FLOPS

# A phase is run at least this often, whatever its share of the time; the run before that compiles.
LEAST_ROUNDS, MOST_ROUNDS = 3, 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `bench.py device`."""
    parser.add_argument(
        "--preset", choices=PRESETS, default="full", help="; ".join(f"{name}: {preset.summary}" for name, preset in PRESETS.items())
    )
    parser.add_argument(
        "--seconds", type=float, default=5.0, help=f"of timed rounds in a phase, at least {LEAST_ROUNDS}; compiling comes on top"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the tokens")


def run(args: argparse.Namespace) -> dict[str, object]:
    """Measures, prints the table and returns the result.

    Raises:
      ValueError: a preset that this device is not for or too small for, a budget of no time; before any work.
      RuntimeError: a loss that is not finite, or decoding too short to be timed.
    """
    if not args.seconds > 0:
        raise ValueError(f"--seconds must be more than 0, got {args.seconds}")
    preset, device = PRESETS[args.preset], jax.devices()[0]
    options = {**preset.sizes, "dtype": preset.dtype, "seed": args.seed}
    config = model_config(options, tokens=preset.tokens)
    memory = check_device(args.preset, config, device)
    start, console = time.perf_counter(), Console()
    parameters = count_parameters(config)
    kernels = _kernels(preset)
    console.print(
        f"{parameters.total / 1e9:.3g} B parameters, {parameters.active / 1e9:.3g} B active, {preset.dtype}, on one "
        f"{device.device_kind}: {args.seconds:g} s a phase and compilation; needs about {memory['needed'] / 1e9:.3g} GB; attention "
        f" {kernels['attention']}, grouped matmul {kernels['grouped_matmul']}"
    )
    machine = Machine({"dtype": preset.dtype})
    limits: dict[str, list[float]] = {part: [] for part in machine.parts}
    _probe(machine, limits)
    peak_dtype = machine.facts["peak_dtype"]
    del machine
    train = _train(console, preset, options, args.seconds)
    prefill = _prefill(console, preset, options, args.seconds)
    decode = {str(rows): _decode(console, preset, options, rows, args.seconds) for rows in preset.decode_batches}
    products = _products(console, preset, args)
    # Before and after: a device that is slowed down by its own heat shows it here.
    _probe(Machine({"dtype": preset.dtype}), limits)
    peak, bandwidth = (statistics.median(limits[part]) for part in ("matmul", "bandwidth"))
    sheet = _data_sheet(device)
    for phase in (train, prefill, *decode.values()):
        rate = phase["flops"] / phase["seconds"]
        phase |= {"mfu": round(rate / peak, 4), "mfu_data_sheet": None if sheet is None else round(rate / sheet, 4)}
    for phase in decode.values():
        phase["bandwidth_share"] = round(phase["bytes"] / phase["seconds"] / bandwidth, 4)
    console.print(_table(train, prefill, decode))
    console.print(_product_table(products))
    took = time.perf_counter() - start
    console.print(
        f"training MFU {train['mfu']:.1%} of {peak / 1e12:.4g} TFLOP/s measured in {peak_dtype}; memory "
        f"{bandwidth / 1e9:.4g} GB/s; {took:.0f} s in all"
    )
    return {
        "bench": "device",
        "preset": args.preset,
        "device": device.device_kind,
        "parameters": {"total": parameters.total, "active": parameters.active},
        "kernels": kernels,
        "train": train,
        "prefill": prefill,
        "decode": decode,
        "grouped_matmul": products,
        "machine": {
            "peak_tflops": peak / 1e12,
            "peak_dtype": peak_dtype,
            "data_sheet_tflops": None if sheet is None else sheet / 1e12,
            "bandwidth_gbs": bandwidth / 1e9,
            "peak_tflops_range": [min(limits["matmul"]) / 1e12, max(limits["matmul"]) / 1e12],
            "bandwidth_gbs_range": [min(limits["bandwidth"]) / 1e9, max(limits["bandwidth"]) / 1e9],
        },
        "memory": memory,
        "seconds": round(took, 1),
        "options": {"preset": args.preset, "timed_seconds": args.seconds, "seed": args.seed, **preset.shapes, **options},
        **provenance(),
    }


def _kernels(preset: Preset) -> dict[str, str]:
    """What `auto` stands for here in training and prefill."""
    backend, chunk_from = jax.default_backend(), ComputeConfig().attention_chunk_from
    attention = choose_implementation(
        "auto", query_length=preset.tokens, backend=backend, chunk_from=chunk_from, dtype=preset.dtype
    )
    return {"attention": attention, "grouped_matmul": AUTO[backend]}


def _probe(machine: Side, limits: Mapping[str, list[float]]) -> None:
    for part, found in limits.items():
        machine.run(part)
        found += [machine.run(part) for _ in range(LEAST_ROUNDS)]


def _train(console: Console, preset: Preset, options: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    batch, tokens = preset.batch_size, preset.tokens
    run_options = run_config(options, batch_size=batch, tokens=tokens)
    ids = random_tokens(options, batch, tokens)
    losses: list[float] = []

    def make() -> Side:
        return Step({"run": run_options, "tokens": ids, "folder": None})

    found = _phase(console, f"training step, {batch} x {tokens}", make, seconds, lambda loss: losses.append(float(loss)))
    if not all(map(math.isfinite, losses)):
        raise RuntimeError(f"the training loss is not finite: {losses}; a bench of it is void")
    step = statistics.median(r["step"] for r in found["rounds"])
    return _figures(found, step, batch * tokens, train_flops(run_options.model, batch, tokens)) | {"losses": losses[:2]}


def _prefill(console: Console, preset: Preset, options: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    batch, tokens = preset.batch_size, preset.tokens
    config = model_config(options, tokens=tokens)
    side = {"config": config, "dtype": preset.dtype, "seed": options["seed"], "folder": None}
    side["tokens"] = random_tokens(options, batch, tokens)
    found = _phase(console, f"prefill, {batch} x {tokens}", lambda: Prefill(side), seconds)
    whole = statistics.median(r["prefill"] for r in found["rounds"])
    return _figures(found, whole, batch * tokens, prefill_flops(config, batch, tokens))


def _decode(console: Console, preset: Preset, options: Mapping[str, Any], rows: int, seconds: float) -> dict[str, Any]:
    """Tokens after the first, by the difference of generating N and generating 1."""
    config = model_config(options, tokens=preset.tokens)
    side = {"config": config, "dtype": preset.dtype, "seed": options["seed"], "folder": None}
    side |= {"tokens": random_tokens(options, rows, preset.prompt), "new": preset.new}
    found = _phase(console, f"decoding, {rows} x {preset.new} after {preset.prompt}", lambda: Decode(side), seconds)
    steps, spent = preset.new - 1, statistics.median(r["all"] - r["first"] for r in found["rounds"])
    if not spent > 0:
        raise RuntimeError(f"{steps} decoding steps took no longer than the disturbance between two calls; give more --seconds")
    flops = steps * decode_flops(config, rows, preset.prompt + preset.new / 2)
    # Every step reads its weights once; the cache is left out.
    size = steps * decode_weights(config, rows) * BYTES[preset.dtype]
    first = statistics.median(r["first"] for r in found["rounds"])
    return _figures(found, spent, rows * steps, flops) | {"bytes": size, "first_token_seconds": first}


def _products(console: Console, preset: Preset, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Backend -> its time and rate over both products of the experts, forward and backward, and its ratio to the dense one."""
    calls, flops = product_calls(preset, args.seed)
    table: dict[str, dict[str, Any]] = {}
    for name in (name for name in calls if name != DENSE):
        console.print(f"grouped matmul, {name} against {DENSE} ...")
        pair = {DENSE: calls[DENSE], name: calls[name]}
        for call in pair.values():
            jax.block_until_ready(call())  # here rather than in `interleave`, whose limit counts the compilation in
        rounds = list(interleave(pair, MOST_ROUNDS, args.seconds, warm_up=False))
        for key in (DENSE, name):
            spent = statistics.median(r[key] for r in rounds)
            table[key] = {"seconds": spent, "tflops": flops / spent / 1e12, "ratio_to_dense": 1.0, "rounds": len(rounds)}
        table[name]["ratio_to_dense"] = round(median_ratio(rounds, name, DENSE), 3)
    return table


def _phase(
    console: Console, title: str, make: Callable[[], Side], seconds: float, see: Callable[[Any], object] = lambda _: None
) -> dict[str, Any]:
    """Makes a side, runs each part once to compile, then in rounds for `seconds`; `see` gets what every run returned."""
    console.print(f"{title} ...")
    start = time.perf_counter()
    side = make()
    for part in side.parts:
        see(side.run(part))
    begin = time.perf_counter()
    rounds: list[dict[str, float]] = []
    while len(rounds) < LEAST_ROUNDS or time.perf_counter() - begin < seconds:
        rounds.append({part: _seconds(side, part, see) for part in side.parts})
    del side
    gc.collect()
    return {"rounds": rounds, "first_run_seconds": begin - start}


def _seconds(side: Side, part: str, see: Callable[[Any], object]) -> float:
    start = time.perf_counter()
    result = side.run(part)
    spent = time.perf_counter() - start
    see(result)
    return spent


def _figures(found: Mapping[str, Any], seconds: float, tokens: int, flops: float) -> dict[str, Any]:
    return {
        "tokens_per_s": tokens / seconds,
        "seconds": seconds,
        "rounds": len(found["rounds"]),
        "first_run_seconds": round(found["first_run_seconds"], 2),
        "flops": flops,
    }


def _data_sheet(device: jax.Device) -> float | None:
    known = [name for name in PEAK_FLOPS if device.device_kind.startswith(name)]
    return PEAK_FLOPS[max(known, key=len)] if known else None


def _table(train: Mapping[str, Any], prefill: Mapping[str, Any], decode: Mapping[str, Mapping[str, Any]]) -> Table:
    phases = {"training step": train, "prefill": prefill, **{f"decoding, {rows} rows": phase for rows, phase in decode.items()}}
    table = Table(title="one device")
    headings: Sequence[str] = ("", "tokens/s", "ms", "TFLOP/s", "MFU", "of data sheet", "of memory bandwidth", "first run, s")
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left")
    for name, p in phases.items():
        sheet = "" if p["mfu_data_sheet"] is None else f"{p['mfu_data_sheet']:.1%}"
        share = f"{p['bandwidth_share']:.0%}" if "bandwidth_share" in p else ""
        rate = p["flops"] / p["seconds"] / 1e12
        cells = (f"{p['tokens_per_s']:,.0f}", f"{p['seconds'] * 1e3:.1f}", f"{rate:.3g}", f"{p['mfu']:.1%}", sheet, share)
        table.add_row(name, *cells, f"{p['first_run_seconds']:.0f}")
    return table


def _product_table(products: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(title="the experts' products, forward and backward")
    for heading in ("", "ms", "TFLOP/s", "ratio to dense"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, p in products.items():
        table.add_row(name, f"{p['seconds'] * 1e3:.2f}", f"{p['tflops']:.3g}", f"{p['ratio_to_dense']:.2f}")
    return table
