"""Router losses, each from sums over tokens, so that no split of a step changes them. E experts, K chosen, D model.

Formulas: the reference Paddle implementation (`_cal_aux_loss`, `_cal_orthogonal_loss_opt_each_weight`, `_cal_z_loss`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def load_balance_loss(probability: jax.Array, counts: jax.Array, tokens: jax.Array, total_tokens: jax.Array) -> jax.Array:
    """Switch-style balance loss `E * sum_e P_e f_e`, which is K at perfect balance.

    P_e is the mean router probability of expert e and f_e the share of tokens that would choose it. f has no gradient, so the
    loss is linear in the tokens once the counts of the whole step are known: parts of a batch add up to the loss of the whole.

    Args:
      probability: [E], sum of router probabilities over the tokens at hand.
      counts: [E], choices (top K of the uncorrected probabilities) over the tokens that f is taken from.
      tokens: scalar, how many tokens `counts` covers.
      total_tokens: scalar, how many tokens the mean probability is over (the whole step).

    Returns:
      Scalar; the part of the loss that the tokens at hand contribute.
    """
    frequency = jax.lax.stop_gradient(counts) / jnp.maximum(tokens, 1e-6)
    return probability.shape[-1] * jnp.sum(probability * frequency, axis=-1) / jnp.maximum(total_tokens, 1e-6)


def z_loss(z_square: jax.Array, total_tokens: jax.Array) -> jax.Array:
    """Mean of logsumexp(logits)^2, from its sum over the tokens at hand and the number of tokens of the whole step."""
    return z_square / jnp.maximum(total_tokens, 1e-6)


def orthogonal_loss(gate: jax.Array, num_groups: int = 1) -> jax.Array:
    """Distance of the normalised gate rows from orthogonality: mean over all entries of (W W^T - I)^2.

    Args:
      gate: [..., E, D], rows are experts; leading axes are layers.
      num_groups: split the experts into this many groups and compare only within a group (the grouped form uses K).

    Returns:
      [...] float32, one value a layer.

    Raises:
      ValueError: a number of groups that does not divide E.
    """
    num_experts, dim = gate.shape[-2:]
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"orthogonal loss: {num_experts} experts cannot be split into {num_groups} equal groups")
    size = num_experts // num_groups
    gram = _cosines(gate.reshape(*gate.shape[:-2], num_groups, size, dim))
    return jnp.mean(jnp.square(gram - jnp.eye(size)), axis=(-3, -2, -1))


def gate_cosine(gate: jax.Array) -> jax.Array:
    """How alike the experts of a gate are: mean |cos| over all pairs of different rows; 0 where they are orthogonal.

    Args:
      gate: [..., E, D].

    Returns:
      [...] float32.
    """
    size = gate.shape[-2]
    different = jnp.where(jnp.eye(size, dtype=bool), 0, _cosines(gate))
    return jnp.sum(jnp.abs(different), axis=(-2, -1)) / max(1, size * (size - 1))


def _cosines(rows: jax.Array) -> jax.Array:
    """[..., n, D] -> [..., n, n] float32, the cosine of each pair of rows."""
    rows = rows.astype(jnp.float32)
    # max(norm, 1e-12) with a gradient that stays finite for a zero row.
    square = jnp.sum(jnp.square(rows), axis=-1, keepdims=True)
    rows = rows * jax.lax.rsqrt(jnp.maximum(square, 1e-24))
    return jnp.einsum("...id,...jd->...ij", rows, rows, precision=jax.lax.Precision.HIGHEST)


def transformers_auxiliary_loss(logits: jax.Array, k: int, valid: jax.Array | None = None) -> jax.Array:
    """The balance loss that `transformers` reports with `output_router_logits`, over all layers and tokens at once.

    Args:
      logits: [L, N, E] raw router scores.
      k: experts a token.
      valid: [N] bool; all tokens when None.

    Returns:
      Scalar `E * sum_e (count_e / N) (P_e / N)`, N counting rows of all layers.
    """
    probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    _, chosen = jax.lax.top_k(probabilities, k)
    mask = jnp.ones(logits.shape[1:2]) if valid is None else valid.astype(jnp.float32)
    hits = jax.nn.one_hot(chosen, logits.shape[-1]).sum(2)
    rows = logits.shape[0] * jnp.maximum(mask.sum(), 1e-6)
    counts, mass = jnp.einsum("lne,n->e", hits, mask) / rows, jnp.einsum("lne,n->e", probabilities, mask) / rows
    return logits.shape[-1] * jnp.sum(jax.lax.stop_gradient(counts) * mass)
