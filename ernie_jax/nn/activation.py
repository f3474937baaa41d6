"""Activation functions by the names used in config.json, and the gate made of them. R rows, F width."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from ernie_jax.native import gated_silu, gated_silu_gradient, missing
from ernie_jax.nn.projection import multiplies_natively

ACTIVATION_FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
}


# Fewer numbers than this the compiler joins with what is beside them, sooner than a kernel of our own is called.
_FEW = 1 << 14


def gated(gate_up: jax.Array, activation: str) -> jax.Array:
    """`activation(gate) * up` of gate_up [..., 2, F] -> [..., F].

    The backward pass keeps gate_up alone, and writes both halves of its gradient at once: the transpose of cutting out a half
    would be a padded array each and a sum.
    """
    if multiplies_natively(gate_up.dtype) and _has_kernel(gate_up, activation):
        return _native(gate_up.reshape(-1, *gate_up.shape[-2:]), None).reshape(*gate_up.shape[:-2], -1)
    return _gated(gate_up, activation)


def gated_rows(gate_up: jax.Array, row_weights: jax.Array, activation: str) -> jax.Array:
    """The same of one device's rows, times their weights: gate_up [R, 2, F], row_weights [R] -> [R, F]."""
    if gate_up.dtype == jnp.float32 and _has_kernel(gate_up, activation) and missing() is None:
        return _native(gate_up, row_weights.astype(jnp.float32))
    return _gated(gate_up, activation) * row_weights[:, None].astype(gate_up.dtype)


def _has_kernel(gate_up: jax.Array, activation: str) -> bool:
    return activation == "silu" and gate_up.size >= _FEW


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gated(gate_up: jax.Array, activation: str) -> jax.Array:
    return ACTIVATION_FUNCTIONS[activation](gate_up[..., 0, :]) * gate_up[..., 1, :]


def _gated_fwd(gate_up: jax.Array, activation: str) -> tuple[jax.Array, jax.Array]:
    return _gated(gate_up, activation), gate_up


def _gated_bwd(activation: str, gate_up: jax.Array, ct: jax.Array) -> tuple[jax.Array]:
    gate, up = gate_up[..., 0, :], gate_up[..., 1, :]
    activated, pullback = jax.vjp(ACTIVATION_FUNCTIONS[activation], gate)
    # Chosen by index: a fused concatenation is computed element by element on CPU, without vector instructions.
    first = jnp.arange(2)[:, None] == 0
    return (jnp.where(first, pullback(ct * up)[0][..., None, :], (ct * activated)[..., None, :]),)


_gated.defvjp(_gated_fwd, _gated_bwd)


@jax.custom_vjp
def _native(gate_up: jax.Array, row_weights: jax.Array | None) -> jax.Array:
    return gated_silu(gate_up, row_weights)


def _native_fwd(gate_up: jax.Array, row_weights: jax.Array | None) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
    return _native(gate_up, row_weights), (gate_up, row_weights)


def _native_bwd(saved: tuple[jax.Array, jax.Array | None], ct: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    return gated_silu_gradient(*saved, ct)


_native.defvjp(_native_fwd, _native_bwd)
