"""Activation functions by the names used in config.json, and the gate made of them. F width."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

ACTIVATION_FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
}


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gated(gate_up: jax.Array, activation: str) -> jax.Array:
    """`activation(gate) * up` of gate_up [..., 2, F] -> [..., F].

    The backward pass keeps gate_up alone, and writes both halves of its gradient at once: the transpose of cutting out a half
    would be a padded array each and a sum.
    """
    return ACTIVATION_FUNCTIONS[activation](gate_up[..., 0, :]) * gate_up[..., 1, :]


def _gated_fwd(gate_up: jax.Array, activation: str) -> tuple[jax.Array, jax.Array]:
    return gated(gate_up, activation), gate_up


def _gated_bwd(activation: str, gate_up: jax.Array, ct: jax.Array) -> tuple[jax.Array]:
    gate, up = gate_up[..., 0, :], gate_up[..., 1, :]
    activated, pullback = jax.vjp(ACTIVATION_FUNCTIONS[activation], gate)
    # Chosen by index: a fused concatenation is computed element by element on CPU, without vector instructions.
    first = jnp.arange(2)[:, None] == 0
    return (jnp.where(first, pullback(ct * up)[0][..., None, :], (ct * activated)[..., None, :]),)


gated.defvjp(_gated_fwd, _gated_bwd)
