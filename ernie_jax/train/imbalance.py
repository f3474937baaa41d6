"""Recompute experts once their load is skewed and memory is short. L MoE layers, E experts, G expert shards."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ernie_jax.config.model import ModelConfig
from ernie_jax.config.remat import recompute_experts
from ernie_jax.config.run import RunConfig
from ernie_jax.config.segments import segments_of
from ernie_jax.sharding import Layout
from ernie_jax.train.hooks import Hook
from ernie_jax.train.records import Record
from ernie_jax.train.remat_choice import compile_step, device_memory, policy_name, step_bytes, with_remat
from ernie_jax.train.remat_prediction import StepShape, tag_bytes
from ernie_jax.train.state import TrainState

logger = logging.getLogger(__name__)


def load_skew(loads: Iterable[Any], shards: int) -> float:
    """Load of the fullest expert shard over the mean, less 1: 0 is even, G - 1 everything on one.

    A device keeps the activations of all its layers until the backward pass, so it is their sum that counts.

    Args:
      loads: for each modality [L, E], rows routed to each expert in a step.
      shards: G; a shard has E / G experts in sequence of each modality.
    """
    parts = [np.asarray(load, float) for load in loads]
    device = sum(load.sum(0).reshape(shards, -1).sum(1) for load in parts)
    mean = float(np.mean(device))
    return float(np.max(device)) / mean - 1 if mean > 0 else 0.0


class ImbalanceGuard(Hook):
    """The train step of a run, which gives way to one with experts recomputed when their load calls for it.

    Buffers have static sizes, so no skew makes a step that ran once run out of memory: without a capacity they hold the worst case,
    with a capacity factor c a share of c, and what is beyond is dropped. The guard's question is whether the step would fit if
    buffers were as large as the load asks: bytes of the step + (skew - (c - 1)) x bytes of expert activations, the last term for
    skew beyond c - 1 alone, against the budget. It is asked when the mean skew since the last time is above the threshold.

    Args:
      run: with a policy (not `auto`), a threshold and a model with experts.
      layout: mesh and rules.
      step: the compiled step.
      room: bytes of a device.
    """

    def __init__(self, run: RunConfig, layout: Layout, step: Any, room: int) -> None:
        assert run.remat_on_imbalance is not None
        self.every = run.log_every
        self._run, self._layout, self._step = run, layout, step
        self._threshold, self._budget = run.remat_on_imbalance, int(run.remat_budget * room)
        self._shards = layout.shards("expert")
        self._bytes, self._activations = step_bytes(step), expert_activation_bytes(run.model, StepShape.of(run, layout))
        self._window: deque[float] = deque(maxlen=max(run.log_every, 1))
        self.recomputing = False

    def __call__(self, state: TrainState, batch: Any) -> Any:
        """The step that is in force."""
        return self._step(state, batch)

    def needed(self, skew: float) -> int:
        """Bytes of a device, were its experts' buffers sized by their load."""
        factor = self._run.moe.capacity_factor
        beyond = 0.0 if factor is None else max(0.0, skew - (factor - 1))
        return int(self._bytes + beyond * self._activations)

    def at_record(self, record: Record, final: bool) -> None:
        """Add the skew to the record; at a logging step decide, once and for the rest of the run."""
        loads = [record[name]["load"] for name in ("router", "vision_router") if record.get(name)]
        record["load_skew"] = load_skew(loads, self._shards)
        self._window.append(record["load_skew"])
        if not (self.recomputing or final) and record["step"] % self.every == 0:
            skew = float(np.mean(self._window))
            if skew > self._threshold and self.needed(skew) > self._budget:
                self._recompute(record["step"], skew)
        record["experts_recomputed"] = int(self.recomputing)

    def _recompute(self, step: int, skew: float) -> None:
        policy = recompute_experts(self._run.remat)
        self._step = compile_step(with_remat(self._run, policy), self._layout)
        self.recomputing = True
        logger.info(
            "after step %d: the fullest device's load is %.0f%% above the mean, and the step would need %s of %s bytes a device; "
            "experts are recomputed from here on (remat %s -> %s, %s -> %s bytes)",
            step,
            100 * skew,
            f"{self.needed(skew):,}",
            f"{self._budget:,}",
            policy_name(self._run.remat),
            policy_name(policy),
            f"{self._bytes:,}",
            f"{step_bytes(self._step):,}",
        )


def imbalance_guard(run: RunConfig, layout: Layout, step: Any, say: Callable[[str], None]) -> ImbalanceGuard | None:
    """The guard of a run; None where it has nothing to do: no threshold, or experts on one shard or recomputed
    already. A device whose memory is not known, or batches of several shapes, leave none either, which is said.

    Args:
      run: with a policy.
      layout: mesh and rules.
      step: the compiled step where there is one, else None.
      say: prints a line.
    """
    wanted = run.remat_on_imbalance is not None and run.model.num_moe_layers and layout.shards("expert") > 1
    if not wanted or recompute_experts(run.remat) == run.remat:
        return None
    room, reason = device_memory(run, layout), ""
    if room is None:
        reason = "the device does not tell its memory; set config.device_memory_bytes"
    elif run.model.vision is not None and run.data.max_patches is None:
        reason = "batches differ in shape; set config.data.max_patches"
    if room is None or reason:
        say(f"{'Imbalance':9} load is not watched for memory (config.remat_on_imbalance={run.remat_on_imbalance}): {reason}")
        return None
    return ImbalanceGuard(run, layout, compile_step(run, layout) if step is None else step, room)


def expert_activation_bytes(model: ModelConfig, shape: StepShape) -> float:
    """Bytes on a device of what `experts` recomputes, in all layers."""
    sizes = tag_bytes(model, shape)
    layers = sum(segment.repeats * segment.unit.count("moe") for segment in segments_of(model))
    return layers * (sizes["moe", "expert_gate_up"] + sizes["moe", "vision_expert_gate_up"])
