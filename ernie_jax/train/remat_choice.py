"""`remat="auto"`: the step is compiled under one policy after another, and the cheapest that fits a device's memory is taken.

Cheapest is by FLOPs of matrix products (`program_flops`): with balanced experts, causal rows and, in a vision-language model, as
many tokens of images as of text. Offloading is no candidate, since what it costs is time on a bus and not FLOPs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from ernie_jax.config.model import ModelConfig
from ernie_jax.config.remat import KINDS, TAGS_OF_KIND, Remat
from ernie_jax.config.run import RunConfig
from ernie_jax.native import switched_off
from ernie_jax.parallel.remat import check_host_memory
from ernie_jax.sharding import Layout
from ernie_jax.train.abstract_batch import abstract_batch
from ernie_jax.train.program_flops import program_flops
from ernie_jax.train.remat_prediction import StepShape
from ernie_jax.train.state import abstract_state
from ernie_jax.train.step import make_train_step

# Keeps the tensors of all tags and makes again what lies between them, which costs no product of weights.
KEEP_TAGS: Remat = tuple(dict.fromkeys(tag for kind in KINDS for tag in TAGS_OF_KIND[kind]))


@dataclass(frozen=True)
class Trial:
    """A policy and what the step costs under it: FLOPs on all devices, bytes of one (None: not compiled)."""

    policy: Remat
    flops: float
    bytes: int | None = None
    step: Any = None


def candidates(model: ModelConfig) -> list[Remat]:
    """The policies that `auto` chooses among for a model, those that keep more first."""
    found: list[Remat] = ["none", KEEP_TAGS]
    if model.num_moe_layers:
        found.append("experts")
    if model.vision is not None:
        found.append("vision")
    found.append("attention")
    if model.num_moe_layers:
        found.append("attention=full,experts=full,vision_experts=full")
        # All but the exchange, so that nothing is sent twice.
        found.append(",".join(f"{kind}=full" for kind in KINDS if kind != "exchange"))
    return [*found, "full"]


def choose_remat(run: RunConfig, layout: Layout, say: Callable[[str], None]) -> tuple[RunConfig, Any]:
    """The run with its policy chosen, and its compiled step (None where the policy was given).

    Policies are compiled by rising FLOPs until one fits: what would come after it costs more.

    Args:
      run: a policy other than `auto` is only checked.
      layout: mesh and rules.
      say: prints a line; it is given the table of what was tried.

    Raises:
      ValueError: nothing fits, with the table; the device's memory is not known; offloading where nothing can be offloaded to.
    """
    devices = layout.mesh.devices.flat
    if run.remat != "auto":
        check_host_memory(run.remat, devices[0].platform)
        return run, None
    room = device_memory(run, layout)
    if room is None:
        raise ValueError(
            f"config.remat='auto' needs the memory of a device, and {devices[0].device_kind!r} does not tell it; set "
            "config.device_memory_bytes"
        )
    budget = int(run.remat_budget * room)
    trials: list[Trial] = []
    for trial in sorted((Trial(p, step_flops(with_remat(run, p), layout)) for p in candidates(run.model)), key=lambda t: t.flops):
        fits = any(t.bytes is not None and t.bytes <= budget for t in trials)
        trials.append(trial if fits else _compiled(trial, run, layout))
    table = trial_table(trials, budget, f"{run.remat_budget:.0%} of {room:,} bytes", devices[0].platform)
    chosen = next((t for t in trials if t.bytes is not None and t.bytes <= budget), None)
    if chosen is None:
        raise ValueError(
            f"config.remat='auto': the step fits {budget:,} bytes a device under no policy:\n{table}\n"
            "Lower config.batch_size or raise config.accumulate, use more devices or a higher config.mesh.zero, or raise "
            "config.remat_budget"
        )
    say(f"{table}\nremat = {policy_name(chosen.policy)}")
    return with_remat(run, chosen.policy), chosen.step


def with_remat(run: RunConfig, policy: Remat) -> RunConfig:
    """The same run under another policy."""
    return dataclasses.replace(run, remat=policy)


def compile_step(run: RunConfig, layout: Layout) -> Any:
    """The compiled train step of a run, without a state or a batch."""
    return make_train_step(run, layout).lower(abstract_state(run, layout), abstract_batch(run, layout)).compile()  # type: ignore[attr-defined]


def step_bytes(compiled: Any) -> int:
    """Bytes of one device that a compiled step needs: arguments, temporaries and outputs, without outputs in arguments' place."""
    m = compiled.memory_analysis()
    return int(m.argument_size_in_bytes + m.temp_size_in_bytes - m.alias_size_in_bytes + m.output_size_in_bytes)


def step_flops(run: RunConfig, layout: Layout) -> float:
    """FLOPs of the matrix products of a step on all devices, experts evenly loaded (see this file's head)."""
    share = StepShape.of(run, layout).rows_share if run.model.num_moe_layers else 1.0
    # A grouped product by name instead of a loop over blocks, whose rounds no program tells.
    counted = dataclasses.replace(run, moe=dataclasses.replace(run.moe, grouped_matmul="ragged_dot"))
    step = make_train_step(counted, layout)
    with switched_off():
        return program_flops(step, abstract_state(run, layout), abstract_batch(run, layout), ragged_share=share)


def device_memory(run: RunConfig, layout: Layout) -> int | None:
    """Bytes of the smallest device, the same on every process: what is configured, else what the devices say; None unknown."""
    if run.device_memory_bytes is not None:
        return run.device_memory_bytes
    mine = [d for d in layout.mesh.devices.flat if d.process_index == jax.process_index()]
    limits = [(d.memory_stats() or {}).get("bytes_limit", 0) for d in mine]
    least = np.int64(min(limits, default=0))
    if jax.process_count() > 1:
        # In MiB: without 64-bit mode what is gathered has 32 bits.
        least = np.int64(multihost_utils.process_allgather(np.int32(least >> 20)).min()) << 20
    return int(least) or None


def policy_name(policy: Remat) -> str:
    """As it is written in a configuration."""
    return policy if isinstance(policy, str) else ("all tags" if policy == KEEP_TAGS else ",".join(policy))


def trial_table(trials: Sequence[Trial], budget: int, of: str, platform: str) -> str:
    """Policy, bytes of a device, FLOPs beyond the least, and whether it fits, a line each."""
    least = min(t.flops for t in trials)
    width = max(len(policy_name(t.policy)) for t in trials)
    lines = [f"Remat: what fits {budget:,} bytes a device ({of})"]
    lines.append(f"{'policy':{width}}  {'bytes':>18}  {'FLOPs':>10}  {'more':>6}  fits")
    for t in trials:
        size, fits = ("not compiled", "costs more") if t.bytes is None else (f"{t.bytes:,}", "yes" if t.bytes <= budget else "no")
        lines.append(f"{policy_name(t.policy):{width}}  {size:>18}  {t.flops:>10.3g}  {t.flops / least - 1:>6.1%}  {fits}")
    if platform == "cpu":
        lines.append("Bytes of temporaries are only indicative on CPU: other backends lay out and fuse in their own way.")
    return "\n".join(lines)


def _compiled(trial: Trial, run: RunConfig, layout: Layout) -> Trial:
    step = compile_step(with_remat(run, trial.policy), layout)
    return dataclasses.replace(trial, bytes=step_bytes(step), step=step)
