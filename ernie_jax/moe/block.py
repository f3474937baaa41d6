"""The mixture-of-experts layer: route, send, compute, bring back, add the shared experts. B batch, T tokens, D model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ernie_jax.config.compute import ComputeConfig
from ernie_jax.config.model import ModelConfig
from ernie_jax.moe.capacity import apply_capacity, drop_padding
from ernie_jax.moe.experts import Experts, ExpertStack
from ernie_jax.moe.router import Router, router_stats
from ernie_jax.moe.routing import RouterOutput
from ernie_jax.nn.dtypes import DtypePolicy
from ernie_jax.nn.mlp import GatedMLP
from ernie_jax.sharding import constrain


class MoE(nnx.Module):
    """Routed experts of the text modality, plus one shared MLP for every token; a vision-language model adds vision experts.

    Attributes:
      router, experts: text tokens' gate and experts.
      vision_router, vision_experts: those of vision tokens, None in a text model.
      shared_experts: a gated MLP, None without shared experts.
    """

    def __init__(self, config: ModelConfig, compute: ComputeConfig, *, rngs: nnx.Rngs, stack: int | None = None) -> None:
        moe = config.moe
        assert moe is not None
        dtypes = DtypePolicy.of(compute)
        self.num_experts = moe.num_experts
        self.k = moe.num_experts_per_tok
        self.capacity_factor = compute.capacity_factor

        def make_router() -> Router:
            return Router(
                moe,
                config.hidden_size,
                initializer_range=config.initializer_range,
                temperature=compute.router_temperature,
                dtypes=dtypes,
                rngs=rngs,
                stack=stack,
            )

        def make_experts(width: int) -> Experts:
            return Experts(
                moe,
                config.hidden_size,
                width,
                compute,
                hidden_act=config.hidden_act,
                initializer_range=config.initializer_range,
                rngs=rngs,
                stack=stack,
            )

        self.router = make_router()
        self.experts = make_experts(moe.intermediate_size)
        vision_width = moe.vision_intermediate_size
        self.vision_router = None if vision_width is None else make_router()
        self.vision_experts = None if vision_width is None else make_experts(vision_width)
        self.shared_experts = (
            GatedMLP(
                config.hidden_size,
                moe.shared_intermediate_size,
                hidden_act=config.hidden_act,
                initializer_range=config.initializer_range,
                dtypes=dtypes,
                rngs=rngs,
                stack=stack,
            )
            if moe.num_shared_experts
            else None
        )

    def __call__(
        self, x: jax.Array, valid: jax.Array, stack: ExpertStack | None = None, *, with_logits: bool = False
    ) -> tuple[jax.Array, RouterOutput]:
        """Text tokens through the text experts.

        Args:
          x: [B, T, D], normalised.
          valid: [B, T] bool; padding is routed nowhere and counted nowhere (the shared experts still see it).
          stack: the experts' weights where they are kept, to read them in place.
          with_logits: keep the raw router scores in the output.

        Returns:
          ([B, T, D], what the router did).
        """
        with jax.named_scope("router"):
            routing, logits, probabilities = self.router(x)
            routing = drop_padding(routing, valid, self.num_experts)
            dropped = jnp.zeros((), jnp.float32)
            if self.capacity_factor is not None:
                routing, dropped = apply_capacity(routing, valid, self.num_experts, self.capacity_factor)
            stats = router_stats(logits, probabilities, routing, valid, self.k, dropped)
        y = constrain(self.experts(x, routing, stack), "batch", "sequence", "activation_embed")
        if self.shared_experts is not None:
            with jax.named_scope("shared_experts"):
                y = y + self.shared_experts(x)
        return y, RouterOutput(stats, logits if with_logits else None)
