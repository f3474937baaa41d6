"""Model FLOPs of a token and the share of the peak they reach. D model, T tokens, E experts, K chosen, V vocabulary.

A token costs 6 FLOPs for each weight of a matrix product it goes through (2 forward, 4 backward), so of the experts only the K
chosen ones count, plus 12 x heads x head width for each token it attends to and each layer. A causal row of T tokens attends to
T / 2 of them on average. A token of an image goes through the narrower vision experts, and a patch through the vision tower and
its part of the resampler. Recomputation and padding are not counted: these are the model's FLOPs, not the hardware's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ernie_jax.config.model import ModelConfig

# Dense bf16 peak of one JAX device, FLOP/s, by the longest key that begins `device_kind`. Vendors' data sheets, without sparsity.
PEAK_FLOPS: dict[str, float] = {
    "NVIDIA B200": 2250e12,  # Blackwell data sheet, 4.5 PF sparse
    "NVIDIA H200": 989.4e12,  # Hopper data sheet, SXM
    "NVIDIA H100": 989.4e12,  # SXM
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H800": 989.4e12,
    "NVIDIA A100": 312e12,  # Ampere data sheet
    "NVIDIA A800": 312e12,
    "NVIDIA L40S": 362e12,  # Ada data sheet
    "NVIDIA L4": 121e12,
    "TPU v4": 275e12,  # Cloud TPU system architecture pages
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,  # v5p
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
}


@dataclass(frozen=True)
class Peak:
    """What MFU is measured against: FLOP/s of all devices together (None when not known) and where the figure comes from."""

    flops: float | None
    source: str


@dataclass(frozen=True)
class ModelCost:
    """Model FLOPs, forward and backward, of a text token, a token of an image or video, and a patch of one."""

    text_token: float
    vision_token: float
    patch: float

    @classmethod
    def of(cls, config: ModelConfig, seq_len: int, *, mtp_blocks: int = 0) -> ModelCost:
        """For causal rows of `seq_len` tokens, with so many blocks of multi-token prediction in training."""
        text = flops_per_token(config, seq_len, mtp_blocks=mtp_blocks)
        if config.vision is None:
            return cls(text, text, 0.0)
        moe = config.moe
        narrower = 0
        if moe is not None and moe.vision_intermediate_size is not None:
            width = moe.intermediate_size - moe.vision_intermediate_size
            narrower = config.num_moe_layers * 3 * config.hidden_size * moe.num_experts_per_tok * width
        return cls(text, text - 6.0 * narrower, 6.0 * patch_parameters(config))

    def step(self, record: Mapping[str, Any]) -> float:
        """Of a step, from the counts in its record."""
        vision = record.get("vision_tokens", 0.0)
        return (record["tokens"] - vision) * self.text_token + vision * self.vision_token + record.get("patches", 0.0) * self.patch


def patch_parameters(config: ModelConfig) -> float:
    """Weights in matrix products that one patch of an image goes through, those of the resampler shared by m^2 patches."""
    vision = config.vision
    assert vision is not None
    dim, area = vision.hidden_size, vision.spatial_merge_size**2
    tower = vision.in_channels * vision.patch_size**2 * dim + vision.depth * (4 * dim * dim + 2 * dim * vision.intermediate_size)
    merged = dim * area
    resampler = 2 * merged * merged + 3 * merged * merged + merged * config.hidden_size
    return tower + resampler / area


def matmul_parameters(config: ModelConfig, *, mtp_blocks: int = 0) -> int:
    """Weights in matrix products that one token goes through: active parameters without embedding look-up, norms and biases.

    A block of multi-token prediction has a projection, a dense layer, and the model's head once more.
    """
    d = config.hidden_size
    head = d * config.vocab_size
    further = 2 * d * d + layer_parameters(config, "dense") + head
    return head + sum(layer_parameters(config, kind) for kind in config.layer_kinds) + mtp_blocks * further


def layer_parameters(config: ModelConfig, kind: str) -> int:
    """The same of one layer, `dense` or `moe`."""
    d = config.hidden_size
    attention = d * config.head_dim * 2 * (config.num_attention_heads + config.num_key_value_heads)
    if kind == "dense":
        return attention + 3 * d * config.intermediate_size
    moe = config.moe
    assert moe is not None
    experts = 3 * d * (moe.num_experts_per_tok * moe.intermediate_size + moe.shared_intermediate_size)
    return attention + d * moe.num_experts + experts


def flops_per_token(config: ModelConfig, seq_len: int, *, mtp_blocks: int = 0) -> float:
    """Model FLOPs of forward and backward of one token in a causal row of `seq_len` tokens, with so many blocks of multi-token
    prediction in training."""
    layers = config.num_hidden_layers + mtp_blocks
    attention = 12.0 * layers * config.num_attention_heads * config.head_dim * (seq_len / 2)
    return 6.0 * matmul_parameters(config, mtp_blocks=mtp_blocks) + attention


def peak_flops(devices: list[jax.Device], override: float | None = None) -> Peak:
    """The peak of `devices` together: what the caller states for one device, the table's value, or on CPU a measurement.

    Fake CPU devices share the machine's cores, so one large product measures the peak of all of them together.
    """
    kind, count = devices[0].device_kind, len(devices)
    if override is not None:
        return Peak(override * count, f"{override:.4g} FLOP/s a device, as configured, x {count}")
    if devices[0].platform == "cpu":
        return Peak(_measured_matmul(devices[0]), "float32 matrix product measured on this machine's CPU, all devices together")
    known = [name for name in PEAK_FLOPS if kind.startswith(name)]
    if not known:
        return Peak(None, f"no peak known for device kind {kind!r}; MFU is not reported")
    name = max(known, key=len)
    return Peak(PEAK_FLOPS[name] * count, f"dense bf16 peak of {name}, {PEAK_FLOPS[name]:.4g} FLOP/s x {count}")


def _measured_matmul(device: jax.Device, size: int = 1024, seconds: float = 0.3) -> float:
    """Best FLOP/s of a square float32 product over about `seconds`."""
    a = jax.device_put(jnp.ones((size, size), jnp.float32), device)
    product = jax.jit(lambda x: jnp.matmul(x, x, precision=jax.lax.Precision.DEFAULT))
    product(a).block_until_ready()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        product(a).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best
