"""Bytes that serving holds on a device: weights at their widths, the key/value cache, and room for a pass.

D hidden, V vocabulary, H heads, G key/value heads, d head width, L layers, E experts, K chosen, F expert width, T tensor, X expert.

Widths are those of FastDeploy's schemes for these models (wint8, wint4, wint2). Where experts have 4 or 2 bits the other matrices
have 8. Tables of tokens, the head, norms and the vision tower stay bfloat16, the routers' gates float32.
- 8: int8 with a bfloat16 scale an output column.
- 4: int4 with a bfloat16 scale for each 128 rows of a column.
- 2: convolutional code, 2 bits and 4 bits of scale for each 64 rows, and 80 bits a column (scale, code scale and zero point), from
  decoder layer 7 on; experts of the layers before have 4 bits, as in the published export of the 300B (arXiv 2507.07145: 89 GB).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ernie_jax.config.model import ModelConfig
from ernie_jax.config.parameters import count_parameters

WEIGHT_BITS = (16, 8, 4, 2)
# FastDeploy's cache types: bfloat16; int8 and fp8, int4; scales are static, one a channel, and take no room a token.
KV_BITS = (16, 8, 4)
# Share of a device's memory that serving may fill: the default of vLLM's and FastDeploy's gpu_memory_utilization.
MEMORY_SHARE = 0.9
# Prompts pass in pieces of at most so many tokens a rank: FastDeploy advises max_num_batched_tokens above 8,096.
CHUNK = 8192
_TWO_BITS_FROM = 7


@dataclass(frozen=True)
class Width:
    """Bits of a weight, its share of scales included, and further bits an output column."""

    bits: float
    column: float = 0.0

    def bytes(self, rows: int, columns: int) -> float:
        """Of a matrix [rows, columns]; columns are the outputs."""
        return (self.bits * rows + self.column) * columns / 8


_WIDTHS = {16: Width(16), 8: Width(8, column=16), 4: Width(4 + 16 / 128), 2: Width(2 + 4 / 64, column=16 + 2 * 32)}


@dataclass(frozen=True, kw_only=True)
class Replica:
    """How one copy of the model lies on devices: heads and widths over `tensor`, experts and sequences over `expert`.

    Attributes:
      tensor: T devices that share every layer's heads and widths.
      expert: X ranks, each with E/X experts and sequences of its own (attention is data parallel over them).
      weight_bits: one of `WEIGHT_BITS`.
      kv_bits: one of `KV_BITS`.
      activations: "bfloat16", or "fp8" where products take 8-bit operands (weights of 8 bits or fewer).
    """

    tensor: int = 1
    expert: int = 1
    weight_bits: int = 16
    kv_bits: int = 16
    activations: str = "bfloat16"

    @property
    def devices(self) -> int:
        """T x X."""
        return self.tensor * self.expert

    @property
    def mesh(self) -> Mapping[str, int]:
        """Its mesh axes, as `plan.links` takes them."""
        return {"tensor": self.tensor, "expert": self.expert}

    @property
    def eight_bit_products(self) -> bool:
        """Whether matrix products run at the FP8 rate and rows are sent in 8 bits."""
        return self.activations == "fp8" and self.weight_bits <= 8


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of a device's weights.

    Attributes:
      attention, mlp: projections, and dense and shared MLPs, of all layers.
      experts: text experts of all layers.
      gate: routers.
      head: table that makes logits (with tied tables also the input's).
      other: held and not read by a token of text: an untied input table, vision tower, resampler and vision experts; and norms.
    """

    attention: float
    mlp: float
    experts: float
    gate: float
    head: float
    other: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.attention + self.mlp + self.experts + self.gate + self.head + self.other


# A search asks for the same replica at every batch.
@functools.lru_cache(maxsize=4096)
def weight_bytes(model: ModelConfig, replica: Replica) -> WeightBytes:
    """Weights on one device of a replica, multi-token-prediction blocks left out.

    Key and value projections are cut at most G ways and copied beyond.
    """
    hidden, heads, tensor = model.hidden_size, model.head_dim, replica.tensor
    dense = _WIDTHS[max(replica.weight_bits, 8)]
    queries, keys = model.num_attention_heads * heads, model.num_key_value_heads * heads
    attention = (dense.bytes(hidden, queries) + dense.bytes(queries, hidden)) / tensor
    attention += 2 * dense.bytes(hidden, keys) / min(tensor, model.num_key_value_heads)
    table = 2.0 * model.vocab_size * hidden / tensor
    mlp = model.layer_kinds.count("dense") * _mlp(dense, hidden, model.intermediate_size) / tensor
    experts = gate = vision = 0.0
    moe = model.moe
    if moe is not None:
        mlp += model.num_moe_layers * _mlp(dense, hidden, moe.shared_intermediate_size) / tensor
        share = moe.num_experts / replica.devices
        for layer, kind in enumerate(model.layer_kinds):
            if kind == "moe":
                width = _expert_width(replica.weight_bits, layer)
                experts += share * _mlp(width, hidden, moe.intermediate_size)
                vision += share * _mlp(width, hidden, moe.vision_intermediate_size or 0)
                gate += 4.0 * (1 if moe.vision_intermediate_size is None else 2) * moe.num_experts * (hidden + 1)
    untied = 0.0 if model.tie_word_embeddings else table
    norms = 2.0 * hidden * (2 * model.num_hidden_layers + 1)
    return WeightBytes(
        attention=model.num_hidden_layers * attention,
        mlp=mlp,
        experts=experts,
        gate=gate,
        head=table,
        other=untied + norms + vision + _tower(model),
    )


def _mlp(width: Width, hidden: int, middle: int) -> float:
    return 2 * width.bytes(hidden, middle) + width.bytes(middle, hidden)


@functools.lru_cache(maxsize=4096)
def expert_bytes(model: ModelConfig, replica: Replica, layer: int) -> float:
    """A device's part of one text expert of a decoder layer."""
    assert model.moe is not None
    return _mlp(_expert_width(replica.weight_bits, layer), model.hidden_size, model.moe.intermediate_size) / replica.tensor


def _expert_width(bits: int, layer: int) -> Width:
    return _WIDTHS[4 if bits == 2 and layer < _TWO_BITS_FROM else bits]


def _tower(model: ModelConfig) -> float:
    """Vision tower and resampler, whole on every device: small beside the language model."""
    if model.vision is None:
        return 0.0
    without = replace(model, vision=None)
    return 2.0 * (count_parameters(model).total - count_parameters(without).total)


def cache_bytes_per_token(model: ModelConfig, kv_bits: int = 16) -> float:
    """Key/value cache of one token over all layers and devices: 2 L G d, `kv_bits` each (keys and values of grouped heads)."""
    return 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * kv_bits / 8


def device_cache_per_token(model: ModelConfig, replica: Replica) -> float:
    """A device's part of it: heads are cut at most G ways over `tensor`, and copied beyond."""
    return cache_bytes_per_token(model, replica.kv_bits) / min(replica.tensor, model.num_key_value_heads)


def workspace_bytes(model: ModelConfig, replica: Replica, tokens: int, rows: int) -> float:
    """What a pass of `tokens` tokens, `rows` of them asked for logits, needs beside weights and cache; of a device.

    Counted in bfloat16, the largest of a layer's phases at once: four arrays of the hidden width; queries, keys and values, or an
    MLP's gate, up and product; for experts the exchange's buckets, X n rows there and back (what the exact exchange of
    `moe.dispatch` holds for n tokens), and the rows of the chosen experts. And float32 logits.
    """
    hidden, tensor = model.hidden_size, replica.tensor
    heads = (model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim / tensor
    phases = [heads, 3 * model.intermediate_size / tensor if "dense" in model.layer_kinds else 0.0]
    if model.moe is not None:
        rows_held = model.moe.num_experts_per_tok * (hidden + 3 * model.moe.intermediate_size / tensor)
        exchanged = 2 * replica.expert * hidden if replica.expert > 1 else 0
        phases.append(rows_held + exchanged)
    piece = min(tokens, CHUNK)
    return 2.0 * piece * (4 * hidden + max(phases)) + 4.0 * rows * model.vocab_size


@dataclass(frozen=True)
class ServingMemory:
    """Bytes of a device: `weights`, `cache`, `workspace`."""

    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def bytes(self) -> float:
        """All of them."""
        return math.fsum(self.parts.values())


def serving_memory(model: ModelConfig, replica: Replica, *, sequences: int, context: int, tokens: int) -> ServingMemory:
    """A device with `sequences` of up to `context` tokens in its rank's cache, in a pass of `tokens` new ones.

    The cache has room for every sequence at its longest.
    """
    return ServingMemory(
        {
            "weights": weight_bytes(model, replica).total,
            "cache": sequences * context * device_cache_per_token(model, replica),
            "workspace": workspace_bytes(model, replica, tokens, sequences),
        }
    )
