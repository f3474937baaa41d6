"""What a router decides and what is counted about it. B batch, T tokens, E experts, K experts a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from ernie_jax.nn.fp8 import Fp8Counts


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routing:
    """The chosen experts of each token.

    Attributes:
      expert_index: [..., K] int32 in 0..E-1; E where the token goes nowhere (padding, or dropped by capacity).
      weights: [..., K] mixing weights, 0 where the token goes nowhere.
    """

    expert_index: jax.Array
    weights: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RouterStats:
    """Sums over the valid tokens of one MoE layer; sums add up over microbatches and devices, so nothing depends on the split.

    Attributes:
      load: [E] float32, assignments dispatched to each expert (after capacity).
      top_k: [E] float32, assignments the uncorrected probabilities would make (the balance loss counts these).
      probability: [E] float32, sum of router probabilities (differentiable).
      z_square: scalar, sum of logsumexp(logits)^2 (differentiable).
      entropy: scalar, sum of the entropies of the router distributions, in nats.
      dropped: scalar, assignments dropped by capacity.
      tokens: scalar, valid tokens.
      fp8: what the casts of the experts' inputs to FP8 lost, an entry an operand (`fp8_experts.OPERANDS`); None without FP8.
    """

    load: jax.Array
    top_k: jax.Array
    probability: jax.Array
    z_square: jax.Array
    entropy: jax.Array
    dropped: jax.Array
    tokens: jax.Array
    fp8: Fp8Counts | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RouterOutput:
    """What a MoE layer tells of its routing.

    Attributes:
      stats: of the text tokens.
      logits: [B, T, E] on request, raw scores before softmax and bias, each token's of its own modality's gate.
      vision: of the image and video tokens, None where the pass had no modalities.
    """

    stats: RouterStats
    logits: jax.Array | None
    vision: RouterStats | None = None

    def with_fp8(self, counts: Sequence[Fp8Counts]) -> RouterOutput:
        """With what the casts to FP8 lost in the experts of text and, where there are two, of vision; unchanged without any."""
        if not counts:
            return self
        vision = self.vision if self.vision is None else replace(self.vision, fp8=counts[1])
        return replace(self, stats=replace(self.stats, fp8=counts[0]), vision=vision)

    @property
    def load(self) -> jax.Array:
        """[E] assignments dispatched to each text expert."""
        return self.stats.load


def count_experts(expert_index: jax.Array, num_experts: int) -> jax.Array:
    """How often each expert occurs in `expert_index` [..., K]: [E] float32; entries equal to E are not counted."""
    # A comparison and a sum, not a scatter: it stays sharded with the tokens and reduces across them.
    hits = expert_index[..., None] == jnp.arange(num_experts, dtype=expert_index.dtype)
    return jnp.sum(hits, axis=tuple(range(hits.ndim - 1)), dtype=jnp.float32)
