"""How long the collectives of a step take on a topology, and which of that time is hidden behind compute.

What is hidden is assumed, not measured:

- Of collectives of weights and their gradients inside a loop over layers or microbatches (ZeRO's gathers and reductions over
  `data` and `expert`), 80% on GPU and TPU, as far as there are layers to compute meanwhile: XLA's latency-hiding scheduler starts
  the next layer's gather, and leaves the last reduction, beside the products of a layer. (Assumed; XLA's flags
  `xla_gpu_enable_latency_hiding_scheduler` and the pipelined collectives are what does it.)
- Of those outside of loops nothing: weights that a pipeline's stages bring together before the first microbatch, parameters
  after ZeRO-1's update.
- Of the exchange of experts (all-to-all, and the gathers of `replicated`) nothing, but for (c - 1) / c in c chunks.
- Of collectives over `tensor` and of what a stage sends to the next one nothing: the next product waits for them.
- On CPU nothing: fake devices share the cores that would compute meanwhile.

Collectives take turns on the network.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ernie_jax.config.run import RunConfig
from ernie_jax.plan.hlo import CollectiveUse
from ernie_jax.plan.links import COLLECTIVES, Group, collective_seconds, group_along
from ernie_jax.plan.operations import CPU_MEETING_FLOPS, EXPERT_SKEW, cpu_seconds
from ernie_jax.plan.topology import Topology
from ernie_jax.sharding.mesh import MESH_AXES

HIDDEN_WEIGHTS = 0.8


@dataclass(frozen=True)
class CommunicationTime:
    """Collectives of a step over the same axes, for the same purpose.

    Attributes:
      axis: mesh axes, as `CollectiveUse.axis`.
      purpose: "weights", "experts", "activations" or "stages".
      in_loop: seconds within loops over microbatches.
      once: seconds outside of them.
      hideable: share of `in_loop` that compute can hide.
    """

    axis: str
    purpose: str
    in_loop: float
    once: float
    hideable: float


def communication(run: RunConfig, topology: Topology, uses: Iterable[CollectiveUse]) -> list[CommunicationTime]:
    """Seconds of a step's collectives, longest first.

    Raises:
      ValueError: a mesh that does not fit the topology, an unknown kind of collective.
    """
    sums: dict[tuple[str, str], list[float]] = {}
    for use in uses:
        if not use.count:
            continue
        purpose = purpose_of(use)
        total = sums.setdefault((use.axis, purpose), [0.0, 0.0])
        total[0 if _loops(run, use) else 1] += use.count * _seconds(run, topology, use)
    found = [
        CommunicationTime(axis, purpose, in_loop, once, _hideable(run, topology, purpose))
        for (axis, purpose), (in_loop, once) in sums.items()
    ]
    return sorted(found, key=lambda each: -(each.in_loop + each.once))


def purpose_of(use: CollectiveUse) -> str:
    """What a collective is for: "experts" (their exchange), "stages" (what one sends to the next), "activations", "weights"."""
    axes = use.axis.partition("/")[0]
    if "exchange" in use.scope or (axes == "expert" and use.kind in ("all-to-all", "ragged-all-to-all")):
        return "experts"
    if axes == "pipeline" and use.kind == "collective-permute":
        return "stages"
    return "activations" if axes == "tensor" or "embed" in use.scope else "weights"


def _loops(run: RunConfig, use: CollectiveUse) -> bool:
    """Whether it runs in a loop over layers or microbatches; of weights outside of them there is one for each."""
    return use.count >= max(2, run.model.num_hidden_layers // (2 * run.mesh.pipeline))


def _hideable(run: RunConfig, topology: Topology, purpose: str) -> float:
    if topology.platform == "cpu":
        return 0.0
    chunks = run.compute.exchange_chunks
    return {"weights": HIDDEN_WEIGHTS, "experts": (chunks - 1) / chunks}.get(purpose, 0.0)


def _seconds(run: RunConfig, topology: Topology, use: CollectiveUse) -> float:
    """Of one run."""
    mesh_shape = run.mesh.sizes
    size, (names, _, part) = use.bytes / use.count, use.axis.partition("/")
    if use.kind == "ragged-all-to-all":
        size *= _filled(run, use.devices)
    axes = tuple(names.split("+")) if names not in ("", "?") else MESH_AXES
    meeting = cpu_seconds(topology, CPU_MEETING_FLOPS)
    if not part and names != "?":
        return meeting + collective_seconds(topology, mesh_shape, use.kind, axes, size)
    whole = group_along(topology, mesh_shape, axes)
    return meeting + COLLECTIVES[use.kind](topology, _part(whole, use.devices, neighbours=part == "inner"), size)


def _filled(run: RunConfig, shards: int) -> float:
    """Share of a ragged exchange's buffer that has rows: a token goes to a shard where one of its K experts is, by even choice."""
    moe = run.model.moe
    if moe is None:
        return 1.0
    own, chosen = moe.num_experts // shards, moe.num_experts_per_tok
    missed = math.comb(moe.num_experts - own, chosen) / math.comb(moe.num_experts, chosen)
    return min(1.0, (1 - missed) * EXPERT_SKEW)


def _part(whole: Group, members: int, *, neighbours: bool) -> Group:
    """A group of some members of an axis: neighbours along it, which fill nodes, or as far apart as can be."""
    if members >= whole.size:
        return whole
    if neighbours:
        per_node = min(members, whole.per_node)
        return Group(members, -(-members // per_node), per_node)
    nodes = min(members, whole.nodes)
    return Group(members, nodes, members // nodes)
