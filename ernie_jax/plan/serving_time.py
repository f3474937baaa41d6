"""How long a pass of serving takes: a roofline of each part of the model, and the exchanges between devices, one after another.

D hidden, V vocabulary, H heads, d head width, E experts, K chosen, T tensor, X expert, n tokens of a rank, B = n X of a replica.

- A part takes the longer of its FLOPs at the rate that large products reach and its bytes at the rate that memory reaches:
  S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model", CACM 52(4), 2009.
- Of E experts B tokens with K choices each touch E (1 - (1 - K/E)^B), if all experts are equally likely: the expected number of
  occupied places. A batch of one reads K experts, a large one reads all.
- A token goes once to each rank that holds one of its experts: X (1 - C(E - E/X, K) / C(E, K)) of them.
- Loads are taken as even; a skew above it lengthens `experts` and the exchange in proportion. Starting kernels takes no time here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ernie_jax.config.model import ModelConfig
from ernie_jax.plan.links import collective_seconds
from ernie_jax.plan.serving_memory import (
    CHUNK,
    Replica,
    device_cache_per_token,
    expert_bytes,
    weight_bytes,
)
from ernie_jax.plan.topology import Topology

# Share of the data sheet's memory bandwidth that reading weights and cache reaches. Assumed: long copies reach about 0.9.
BANDWIDTH_SHARE = 0.8


@dataclass(frozen=True)
class ServingTime:
    """Seconds of a pass by part, which follow each other.

    Attributes:
      parts: "attention", "cache", "mlp", "experts", "head", "tensor exchange", "expert exchange", and "handoff", the time by which
        sending the cache away outlasts the pass.
      bounds: of each part that computes, "compute" or "memory": what it waits for.
      dispatcher: the one that the exchange over experts is quicker with: "local", "all_to_all" or "replicated".
    """

    parts: Mapping[str, float]
    bounds: Mapping[str, str]
    dispatcher: str

    @property
    def seconds(self) -> float:
        """The whole pass."""
        return math.fsum(self.parts.values())


def touched_experts(experts: int, chosen: int, tokens: float) -> float:
    """Expected number of a layer's experts that any of so many tokens chooses."""
    return experts * (1 - (1 - chosen / experts) ** tokens)


def reached_ranks(experts: int, chosen: int, ranks: int) -> float:
    """Expected number of ranks that hold an expert of a token's choice."""
    return ranks * (1 - math.comb(experts - experts // ranks, chosen) / math.comb(experts, chosen))


def pass_time(
    model: ModelConfig, topology: Topology, replica: Replica, *, sequences: int, tokens: int, context: float
) -> ServingTime:
    """A pass in which each rank adds `tokens` tokens to each of its `sequences`, each token seeing `context` positions on average.

    Args:
      model: the model.
      topology: the machine, of exactly the replica's devices.
      replica: how the model lies on them.
      sequences: of one rank; X times as many are in the replica.
      tokens: 1 in decoding, a prompt's length in reading it.
      context: mean number of positions that a token attends to.
    """
    count = sequences * tokens
    pieces = math.ceil(count / CHUNK)  # Each reads the weights again.
    weights = weight_bytes(model, replica)
    rate = topology.peak("fp8" if replica.eight_bit_products else "bfloat16") * topology.matmul_efficiency
    plain = topology.peak("bfloat16") * topology.matmul_efficiency
    hidden, tensor = model.hidden_size, replica.tensor
    heads = model.num_attention_heads * model.head_dim
    projections = 2 * hidden * (heads + model.num_key_value_heads * model.head_dim)
    layers = model.num_hidden_layers
    # FLOPs of a device, bytes it reads, and its rate.
    work: dict[str, tuple[float, float, float]] = {
        "attention": (2.0 * count * layers * projections / tensor, pieces * weights.attention, rate),
        "cache": (
            4.0 * count * layers * heads * context / tensor,
            sequences * context * device_cache_per_token(model, replica),
            plain,
        ),
        "mlp": (2.0 * count * _mlp_parameters(model) / tensor, pieces * weights.mlp, rate),
        "experts": (
            2.0 * count * _expert_parameters(model) / tensor,
            pieces * _touched_bytes(model, replica, count / pieces),
            rate,
        ),
        "head": (2.0 * sequences * hidden * model.vocab_size / tensor, weights.head, plain),
    }
    bandwidth = topology.memory_bandwidth * BANDWIDTH_SHARE
    parts, bounds = {}, {}
    for name, (flops, read, speed) in work.items():
        parts[name] = max(flops / speed, read / bandwidth)
        bounds[name] = "compute" if flops / speed > read / bandwidth else "memory"
    parts["tensor exchange"] = _tensor_exchange(model, topology, replica, count, sequences)
    dispatcher, parts["expert exchange"] = _expert_exchange(model, topology, replica, count)
    return ServingTime(parts, bounds, dispatcher)


def _mlp_parameters(model: ModelConfig) -> int:
    """Of dense and shared MLPs and routers."""
    total = model.layer_kinds.count("dense") * 3 * model.hidden_size * model.intermediate_size
    if (moe := model.moe) is not None:
        total += model.num_moe_layers * model.hidden_size * (3 * moe.shared_intermediate_size + moe.num_experts)
    return total


def _expert_parameters(model: ModelConfig) -> int:
    """Of the K experts of a token in each layer. A rank's experts see as many choices as its own tokens make."""
    moe = model.moe
    return 0 if moe is None else model.num_moe_layers * 3 * model.hidden_size * moe.num_experts_per_tok * moe.intermediate_size


def _touched_bytes(model: ModelConfig, replica: Replica, count: float) -> float:
    """Bytes of the experts that a device reads for `count` tokens of each rank."""
    if (moe := model.moe) is None:
        return 0.0
    local = touched_experts(moe.num_experts, moe.num_experts_per_tok, count * replica.expert) / replica.expert
    return local * sum(expert_bytes(model, replica, layer) for layer, kind in enumerate(model.layer_kinds) if kind == "moe")


def _tensor_exchange(model: ModelConfig, topology: Topology, replica: Replica, count: int, sequences: int) -> float:
    """Two all-reduces a layer, of attention and MLP, and the logits gathered for sampling."""
    if replica.tensor == 1:
        return 0.0
    sums = collective_seconds(topology, replica.mesh, "all-reduce", ("tensor",), 2.0 * count * model.hidden_size)
    logits = collective_seconds(topology, replica.mesh, "all-gather", ("tensor",), 4.0 * sequences * model.vocab_size)
    return 2 * model.num_hidden_layers * sums + logits


def _expert_exchange(model: ModelConfig, topology: Topology, replica: Replica, count: int) -> tuple[str, float]:
    """The quicker of two exchanges: rows to the ranks that need them and back, or all rows to all and their sums back."""
    moe = model.moe
    if moe is None or replica.expert == 1:
        return "local", 0.0
    # Rows of 8 bits carry a float32 scale for each 128 values; results come back in bfloat16.
    there = (1 + 4 / 128 if replica.eight_bit_products else 2.0) * model.hidden_size
    back = 2.0 * model.hidden_size

    def seconds(kind: str, size: float) -> float:
        return collective_seconds(topology, replica.mesh, kind, ("expert",), size)

    rows = count * reached_ranks(moe.num_experts, moe.num_experts_per_tok, replica.expert)
    everything = count * replica.expert
    times = {
        "all_to_all": seconds("all-to-all", rows * there) + seconds("all-to-all", rows * back),
        "replicated": seconds("all-gather", everything * there) + seconds("reduce-scatter", everything * back),
    }
    name = min(times, key=lambda key: times[key])
    return name, model.num_moe_layers * times[name]
