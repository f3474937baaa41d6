"""The router: float32 scores, bias-corrected selection, uncorrected weights. B, T tokens; D model; E experts; K chosen.

Formula (reference implementation, architecture of ERNIE 4.5):

    z = x Wg^T;  p = softmax(z / temperature);  chosen = top_K(p + b);  w = p[chosen] / max(sum p[chosen], norm_min)

The correction bias b decides who is chosen and never how much they weigh.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ernie_jax.config.model import MoEConfig
from ernie_jax.moe.routing import RouterStats, Routing, count_experts
from ernie_jax.nn.dtypes import DtypePolicy
from ernie_jax.nn.parameter import normal, parameter
from ernie_jax.nn.projection import project_turned
from ernie_jax.sharding import constrain


class RouterBias(nnx.Variable):
    """The score-correction bias: state of the model, not a parameter; no optimiser ever sees it."""


def top_k_index(scores: jax.Array, k: int) -> jax.Array:
    """Indices of the k largest entries of the last dimension, largest first, the lowest index among equals.

    K rounds of argmax rather than `lax.top_k`: the partitioner replicates a TopK call over the whole batch, whereas these
    reductions stay where the tokens are.

    Args:
      scores: [..., E] float.
      k: how many.

    Returns:
      [..., k] int32.
    """
    experts = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    chosen = []
    for _ in range(k):
        best = jnp.argmax(scores, axis=-1).astype(jnp.int32)
        chosen.append(best)
        scores = jnp.where(experts == best[..., None], -jnp.inf, scores)
    return jnp.stack(chosen, axis=-1)


def route(
    logits: jax.Array, bias: jax.Array | None, k: int, *, norm_min: float = 1e-12, temperature: float = 1.0
) -> tuple[Routing, jax.Array]:
    """Choose experts from raw scores.

    Args:
      logits: [..., E] float32, z.
      bias: [E] float32 correction bias, or None.
      k: experts a token.
      norm_min: lower bound of the normaliser.
      temperature: divides the scores before the softmax; 1 is the published model.

    Returns:
      (routing, probabilities [..., E]); the weights' gradient flows into the logits, the choice has none.

    Raises:
      ValueError: k above the number of experts.
    """
    num_experts = logits.shape[-1]
    if k > num_experts:
        raise ValueError(f"cannot choose {k} experts a token from {num_experts}")
    probabilities = jax.nn.softmax(logits / temperature, axis=-1)
    corrected = jax.lax.stop_gradient(probabilities)
    if bias is not None:
        corrected = corrected + bias
    index = top_k_index(corrected, k)
    # Picked by comparison instead of a gather, whose backward would be a scatter across the sharded tokens.
    picked = jnp.where(index[..., None] == jnp.arange(num_experts, dtype=index.dtype), probabilities[..., None, :], 0.0).sum(-1)
    weights = picked / jnp.maximum(picked.sum(-1, keepdims=True), norm_min)
    return Routing(index, weights), probabilities


def router_stats(
    logits: jax.Array, probabilities: jax.Array, routing: Routing, valid: jax.Array, k: int, dropped: jax.Array
) -> RouterStats:
    """Sums over the valid tokens (see `RouterStats`).

    Args:
      logits, probabilities: [B, T, E].
      routing: as dispatched, [B, T, K].
      valid: [B, T] bool.
      k: experts a token.
      dropped: scalar, assignments removed by capacity.
    """
    num_experts = logits.shape[-1]
    mask = valid.astype(jnp.float32)
    uncorrected = jnp.where(valid[..., None], top_k_index(jax.lax.stop_gradient(probabilities), k), num_experts)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    frozen = jax.lax.stop_gradient(probabilities)
    entropy = -jnp.sum(frozen * jnp.log(jnp.maximum(frozen, 1e-30)), axis=-1)
    return RouterStats(
        load=count_experts(routing.expert_index, num_experts),
        top_k=count_experts(uncorrected, num_experts),
        probability=jnp.einsum("bte,bt->e", probabilities, mask, precision=jax.lax.Precision.HIGHEST),
        z_square=jnp.sum(jnp.square(log_z) * mask),
        entropy=jnp.sum(entropy * mask),
        dropped=dropped,
        tokens=mask.sum(),
    )


class Router(nnx.Module):
    """Gate [E, D] and correction bias [E], both float32 whatever the model's format."""

    def __init__(
        self,
        config: MoEConfig,
        hidden_size: int,
        *,
        initializer_range: float,
        temperature: float,
        dtypes: DtypePolicy,
        rngs: nnx.Rngs,
        stack: int | None = None,
    ) -> None:
        self.k = config.num_experts_per_tok
        self.norm_min = config.norm_min
        self.temperature = temperature
        self.gate = parameter(
            rngs,
            (config.num_experts, hidden_size),
            ("router_experts", "norm"),
            init=normal(initializer_range),
            dtype=dtypes.router,
            stack=stack,
        )
        shape = (config.num_experts,) if stack is None else (stack, config.num_experts)
        axes = ("router_experts",) if stack is None else ("layers", "router_experts")
        self.bias = RouterBias(jnp.zeros(shape, dtypes.router), axes=axes)

    def logits(self, x: jax.Array) -> jax.Array:
        """Raw scores [B, T, E] of x [B, T, D], float32 at the highest precision: near-tied experts flip otherwise."""
        z = project_turned(x.astype(jnp.float32), self.gate[...], jax.lax.Precision.HIGHEST)
        return constrain(z, "batch", "sequence", "activation_experts")

    def __call__(self, x: jax.Array) -> tuple[Routing, jax.Array, jax.Array]:
        """Route x [B, T, D]: (routing, logits [B, T, E], probabilities [B, T, E])."""
        logits = checkpoint_name(self.logits(x), "router")
        routing, probabilities = route(logits, self.bias[...], self.k, norm_min=self.norm_min, temperature=self.temperature)
        return routing, logits, probabilities
