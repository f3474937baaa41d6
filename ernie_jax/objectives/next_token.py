"""Next-token cross-entropy without the full logits. B batch, T tokens, D model, V vocabulary; P pieces of w tokens.

Logits exist for one piece at a time. With a gradient wanted, the pass that makes a piece's logits also makes from them the
gradients with respect to its hidden states and the head, before it drops them: three products a piece. Recomputing the logits
in the backward pass would take four, keeping them [B, T, V] memory.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from ernie_jax.native import contracted_rows
from ernie_jax.nn.dtypes import DtypePolicy
from ernie_jax.nn.projection import multiplies_natively, project, project_turned
from ernie_jax.sharding import BATCH_AXES, Layout, constrain, use_layout

IGNORE = -100


def token_losses(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Cross-entropy of each token in nats, 0 where the label is negative.

    Args:
      logits: [..., V].
      labels: [...] integers; negative ones (-100) are not scored.

    Returns:
      [...] float32.
    """
    logits = logits.astype(jnp.float32)
    # The label's logit by comparison: a gather with -100 would read NaN, and with a sharded vocabulary move everything.
    hit = labels[..., None] == jnp.arange(logits.shape[-1], dtype=labels.dtype)
    chosen = jnp.sum(jnp.where(hit, logits, 0.0), axis=-1)
    return jnp.where(labels >= 0, jax.nn.logsumexp(logits, axis=-1) - chosen, 0.0)


def chunked_cross_entropy(
    hidden: jax.Array,
    kernel: jax.Array,
    labels: jax.Array,
    dtypes: DtypePolicy,
    *,
    chunk: int,
    layout: Layout | None = None,
    weights: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Sum of the token losses, and each of them, holding logits of one chunk at a time, forward and backward.

    Args:
      hidden: [B, T, D], normed.
      kernel: [V, D] output head.
      labels: [B, T], already shifted: the label of position t is token t + 1; negative is not scored.
      dtypes: formats of the head product.
      chunk: tokens of a device whose logits exist at once.
      layout: mesh and rules, to know how many rows a device has.
      weights: [B, T] float32 factor of each token's loss in the sum, None for 1; it has no gradient.

    Returns:
      (weighted sum over the whole batch, losses [B, T] without weights, for reports: they have no gradient), float32.
    """
    batch, tokens, dim = hidden.shape
    rows = max(1, batch // (1 if layout is None else layout.axis_size(*BATCH_AXES)))
    pieces = max(1, math.ceil(rows * tokens / chunk))
    width = math.ceil(tokens / pieces)
    pieces = math.ceil(tokens / width)
    with use_layout(layout):
        hidden = constrain(hidden, "batch", "full_sequence", "activation_embed")
        extra = pieces * width - tokens
        hidden = jnp.pad(hidden, ((0, 0), (0, extra), (0, 0)))

        def cut(x: jax.Array, fill: float) -> jax.Array:
            padded = jnp.pad(x, ((0, 0), (0, extra)), constant_values=fill)
            return jnp.moveaxis(padded.reshape(batch, pieces, width), 1, 0)

        states = jnp.moveaxis(hidden.reshape(batch, pieces, width, dim), 1, 0)
        factors = None if weights is None else cut(jax.lax.stop_gradient(weights), 0)
        with jax.named_scope("head_and_loss"):
            total, losses = _loss_sum((dtypes, layout), states, cut(labels, IGNORE), factors, kernel)
    return total, jax.lax.stop_gradient(jnp.moveaxis(losses, 0, 1).reshape(batch, -1)[:, :tokens])


# Number formats and layout; the latter because a forward pass for gradients may be traced after the caller has left it.
_Settings = tuple[DtypePolicy, Layout | None]
# Hidden states [B, w, D], labels and weights [B, w].
_Piece = tuple[jax.Array, jax.Array, jax.Array | None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss_sum(
    settings: _Settings, hidden: jax.Array, labels: jax.Array, weights: jax.Array | None, kernel: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """hidden [P, B, w, D], labels and weights [P, B, w], kernel [V, D] -> the weighted sum of token losses, and all of them."""

    def piece(total: jax.Array, x: _Piece) -> tuple[jax.Array, jax.Array]:
        states, targets, factors = x
        losses = token_losses(_logits(settings, states, kernel), targets)
        return total + jnp.sum(losses if factors is None else losses * factors), losses

    return jax.lax.scan(piece, jnp.zeros((), jnp.float32), (hidden, labels, weights))


def _logits(settings: _Settings, states: jax.Array, kernel: jax.Array) -> jax.Array:
    dtypes, layout = settings
    with use_layout(layout):
        logits = project_turned(states, dtypes.cast(kernel))
        return constrain(logits, "batch", "full_sequence", "activation_vocab")


def _forward(
    settings: _Settings, hidden: jax.Array, labels: jax.Array, weights: jax.Array | None, kernel: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Sum and losses, and the sum's gradients with respect to hidden and kernel (turned, [D, V], but of native products)."""
    dtypes, layout = settings
    head = dtypes.cast(kernel)
    natively = _natively(settings, hidden, kernel)

    def piece(carry: tuple[jax.Array, jax.Array], x: _Piece) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
        total, d_head = carry
        states, targets, factors = x
        losses, pullback = jax.vjp(lambda logits: token_losses(logits, targets), _logits(settings, states, kernel))
        factors = jnp.ones_like(losses) if factors is None else factors
        d_logits = pullback(factors)[0].astype(states.dtype)
        with use_layout(layout):
            d_states = project(d_logits, head)
            d_states = constrain(d_states, "batch", "full_sequence", "activation_embed")
        if natively:
            d_head += contracted_rows(*(a.reshape(-1, a.shape[-1]) for a in (d_logits, states)))
        else:
            # [D, V]: of the two factors of a product over tokens one is turned first; that should not be the logits.
            d_head += jnp.einsum("btd,btv->dv", states, d_logits, preferred_element_type=jnp.float32)
        return (total + jnp.sum(losses * factors), d_head), (d_states, losses)

    zero = jnp.zeros(kernel.shape if natively else kernel.shape[::-1], jnp.float32)
    (total, d_head), (d_hidden, losses) = jax.lax.scan(piece, (jnp.zeros((), jnp.float32), zero), (hidden, labels, weights))
    return (total, losses), (d_hidden, d_head)


def _backward(
    settings: _Settings, saved: tuple[jax.Array, jax.Array], cts: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, None, None, jax.Array]:
    d_hidden, d_head = saved
    ct, _ = cts
    d_head = d_head if _natively(settings, d_hidden, d_head) else d_head.T
    return (ct * d_hidden.astype(jnp.float32)).astype(d_hidden.dtype), None, None, (ct * d_head).astype(settings[0].param)


def _natively(settings: _Settings, hidden: jax.Array, kernel: jax.Array) -> bool:
    dtypes, layout = settings
    with use_layout(layout):
        return multiplies_natively(hidden.dtype, dtypes.compute, kernel.dtype)


_loss_sum.defvjp(_forward, _backward)
