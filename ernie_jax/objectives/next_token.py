"""Next-token cross-entropy without the full logits. B batch, T tokens, D model, V vocabulary, C tokens of a chunk."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from ernie_jax.nn.dtypes import DtypePolicy
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
    hidden: jax.Array, kernel: jax.Array, labels: jax.Array, dtypes: DtypePolicy, *, chunk: int, layout: Layout | None = None
) -> tuple[jax.Array, jax.Array]:
    """Sum of the token losses and number of scored tokens, holding logits of one chunk at a time, forward and backward.

    Args:
      hidden: [B, T, D], normed.
      kernel: [V, D] output head.
      labels: [B, T], already shifted: the label of position t is token t + 1; negative is not scored.
      dtypes: formats of the head product.
      chunk: tokens of a device whose logits exist at once.
      layout: mesh and rules, to know how many rows a device has.

    Returns:
      (loss sum, token count), float32 scalars over the whole batch.
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
        padded = jnp.pad(labels, ((0, 0), (0, extra)), constant_values=IGNORE)

        def piece(total: jax.Array, x: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            states, targets = x
            logits = jnp.einsum("btd,vd->btv", states, dtypes.cast(kernel), preferred_element_type=jnp.float32)
            logits = constrain(logits, "batch", "full_sequence", "activation_vocab")
            return total + jnp.sum(token_losses(logits, targets)), None

        split = (
            jnp.moveaxis(hidden.reshape(batch, pieces, width, dim), 1, 0),
            jnp.moveaxis(padded.reshape(batch, pieces, width), 1, 0),
        )
        with jax.named_scope("head_and_loss"):
            # Recomputing a chunk's logits in the backward pass is what keeps [tokens, V] from ever existing.
            total, _ = jax.lax.scan(jax.checkpoint(piece, prevent_cse=False), jnp.zeros((), jnp.float32), split)
    return total, jnp.sum(labels >= 0, dtype=jnp.float32)
