"""What `bench device` runs, and whether a device has the memory for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from ernie_jax.config import ModelConfig
from ernie_jax.config.parameters import count_parameters

# A float32 parameter, its two Adam moments and its gradient, and its copy in the compute format.
BYTES_A_PARAMETER = 4 * 4 + 2
# The buffers of the measurement of memory bandwidth, which live beside nothing else but make a floor.
LEAST_BYTES = 5e9


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One size of the whole set.

    Attributes:
      summary: what `--help` says.
      sizes: options of `benches.model`.
      batch_size, tokens: rows and tokens a row of a training step and of prefill.
      decode_batches: rows decoded at once, one phase each.
      prompt, new: tokens of a prompt and new tokens in decoding.
      dtype: of activations and products.
    """

    summary: str
    sizes: Mapping[str, int]
    batch_size: int
    tokens: int
    decode_batches: tuple[int, ...]
    prompt: int
    new: int
    dtype: str = "bfloat16"

    @property
    def shapes(self) -> dict[str, object]:
        """What was run, for the record."""
        names = ("batch_size", "tokens", "decode_batches", "prompt", "new")
        return {name: getattr(self, name) for name in names}


PRESETS = {
    # Widths, experts and heads of ERNIE-4.5-21B-A3B; four of its layers, and a third of its vocabulary, so that the head
    # takes no larger a share of the work than one layer does.
    "full": Preset(
        summary="2.5 B parameters of ERNIE-4.5-21B-A3B's widths, sequences of 4096, for a GPU or TPU",
        sizes={
            "hidden": 2560,
            "layers": 4,
            "heads": 20,
            "kv_heads": 4,
            "head_dim": 128,
            "dense_width": 12288,
            "experts": 64,
            "experts_per_token": 6,
            "width": 1536,
            "vocab": 32768,
        },
        batch_size=4,
        tokens=4096,
        decode_batches=(1, 32),
        prompt=512,
        new=128,
    ),
    "tiny": Preset(
        summary="the same phases in under a minute on a CPU, whose figures mean nothing",
        sizes={
            "hidden": 64,
            "layers": 2,
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 16,
            "dense_width": 128,
            "experts": 8,
            "experts_per_token": 2,
            "width": 32,
            "vocab": 512,
        },
        batch_size=2,
        tokens=64,
        decode_batches=(2,),
        prompt=16,
        new=64,
    ),
}


def memory_needed(config: ModelConfig, preset: Preset) -> float:
    """Bytes the training step holds at once, the largest of the phases: the state, and what the backward pass needs.

    Kept of a token and layer, in the compute format: of a MoE layer for each chosen expert its input row, gate, up, their
    product and its output; of attention the queries, keys, values and output; four rows of the residual stream. While a layer's
    backward pass runs, about as much again: XLA's own figure for `full` on an H200 is 65 GB, this one 68.
    """
    moe = config.moe
    assert moe is not None
    chosen = moe.num_experts_per_tok + moe.num_shared_experts
    experts = chosen * (2 * config.hidden_size + 3 * moe.intermediate_size)
    attention = config.head_dim * (2 * config.num_attention_heads + 2 * config.num_key_value_heads)
    kept = config.num_hidden_layers * (experts + attention + 4 * config.hidden_size)
    activations = 2 * 2.0 * preset.batch_size * preset.tokens * kept
    return max(BYTES_A_PARAMETER * count_parameters(config).total + activations, LEAST_BYTES)


def check_device(name: str, config: ModelConfig, device: jax.Device) -> dict[str, Any]:
    """Refuses a preset that does not suit the device; returns the bytes needed and those it has for JAX, where it tells.

    Raises:
      ValueError: the preset for accelerators on a CPU, or too little memory.
    """
    preset = PRESETS[name]
    if device.platform == "cpu":
        if name != "tiny":
            raise ValueError(f"--preset {name} is for a GPU or TPU and this is a CPU; give --preset tiny")
        return {"needed": memory_needed(config, preset), "limit": None}
    needed, statistics = memory_needed(config, preset), device.memory_stats()
    limit = None if statistics is None else statistics.get("bytes_limit")
    if limit is not None and limit < needed:
        raise ValueError(
            f"--preset {name} needs about {needed / 1e9:.3g} GB and {device.device_kind} gives JAX {limit / 1e9:.3g} GB; on a GPU "
            "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 gives it more than the default three quarters of the card; else take a larger one"
        )
    return {"needed": needed, "limit": limit}
