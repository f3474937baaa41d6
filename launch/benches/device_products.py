"""The experts' products of `bench device`, forward and backward, and the dense one of equal FLOPs (cuBLAS on a GPU).

R rows, E experts, D hidden size, F expert width: gate and up fused [R, D] x [E, D, 2F], down [R, F] x [E, F, D].
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benches.device_presets import Preset
from ernie_jax.moe.grouped_matmul import grouped_matmul

DENSE = "one dense matmul"
# Those whose work follows the group sizes. `dense`, and `ragged_dot` but on a TPU v5p, do E times the FLOPs on E times the rows:
# `bench.py moe --all-backends` measures them at smaller sizes.
GROUPED = {"gpu": ("pallas", "blocks"), "tpu": ("megablox", "blocks"), "cpu": ("blocks", "pallas")}

Array = jax.Array


def product_calls(preset: Preset, seed: int) -> tuple[dict[str, Callable[[], object]], float]:
    """Name -> one call of both products with their backward, and the FLOPs of a call; rows are drawn evenly over the experts."""
    sizes = preset.sizes
    experts, hidden, width = sizes["experts"], sizes["hidden"], sizes["width"]
    num_rows = preset.batch_size * preset.tokens * sizes["experts_per_token"]
    drawn = np.random.default_rng(seed).multinomial(num_rows, np.full(experts, 1 / experts))
    layers = []
    for i, (inner, outer) in enumerate(((hidden, 2 * width), (width, hidden))):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), i), 3)
        rows, cotangent = (jax.random.normal(k, (num_rows, n), preset.dtype) for k, n in zip(keys, (inner, outer), strict=False))
        weights = jax.random.normal(keys[2], (experts, inner, outer), preset.dtype) * inner**-0.5
        layers.append((rows, weights, cotangent))
    # Group sizes are an argument: as constants the compiler could unroll for these very ones.
    group_sizes = jnp.asarray(drawn, jnp.int32)
    dense = [(rows, weights[0], cotangent) for rows, weights, cotangent in layers]
    calls: dict[str, Callable[[], object]] = {DENSE: functools.partial(jax.jit(_dense), dense)}
    for name in GROUPED[jax.default_backend()]:
        calls[name] = functools.partial(jax.jit(functools.partial(_grouped, name)), layers, group_sizes)
    return calls, 3 * 2.0 * num_rows * 3 * hidden * width


def _dense(layers: list[tuple[Array, ...]]) -> list[tuple[Array, ...]]:
    return [_both(jnp.matmul, *layer) for layer in layers]


def _grouped(backend: str, layers: list[tuple[Array, ...]], group_sizes: Array) -> list[tuple[Array, ...]]:
    product = functools.partial(grouped_matmul, group_sizes=group_sizes, backend=backend)
    return [_both(product, *layer) for layer in layers]


def _both(product: Callable[[Array, Array], Array], rows: Array, weights: Array, cotangent: Array) -> tuple[Array, ...]:
    out, pullback = jax.vjp(product, rows, weights)
    return (out, *pullback(cotangent))
