"""Model FLOPs of a token and the share of the peak they reach. D model, T tokens, E experts, K chosen, V vocabulary.

A token costs 6 FLOPs for each weight of a matrix product it goes through (2 forward, 4 backward), so of the experts only the K
chosen ones count, plus 12 x heads x head width for each token it attends to and each layer. A causal row of T tokens attends to
T / 2 of them on average. Recomputation is not counted: these are the model's FLOPs, not the hardware's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

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


def matmul_parameters(config: ModelConfig) -> int:
    """Weights in matrix products that one token goes through: active parameters without embedding look-up, norms and biases."""
    d = config.hidden_size
    attention = d * config.head_dim * 2 * (config.num_attention_heads + config.num_key_value_heads)
    total = d * config.vocab_size
    for kind in config.layer_kinds:
        total += attention
        if kind == "dense":
            total += 3 * d * config.intermediate_size
        else:
            moe = config.moe
            assert moe is not None
            experts = 3 * d * (moe.num_experts_per_tok * moe.intermediate_size + moe.shared_intermediate_size)
            total += d * moe.num_experts + experts
    return total


def flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """Model FLOPs of forward and backward of one token in a causal row of `seq_len` tokens."""
    attention = 12.0 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * (seq_len / 2)
    return 6.0 * matmul_parameters(config) + attention


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
