"""The mixture-of-experts layer: route, send, compute, bring back, add the shared experts. B batch, T tokens, D model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ernie_jax.config.compute import ComputeConfig
from ernie_jax.config.model import ModelConfig
from ernie_jax.moe.capacity import apply_capacity, drop_padding
from ernie_jax.moe.expert_exchange import apply_experts
from ernie_jax.moe.experts import Experts, ExpertStack, QuantizedExperts
from ernie_jax.moe.router import Router, route, router_stats
from ernie_jax.moe.routing import RouterOutput, RouterStats, Routing
from ernie_jax.nn.dtypes import DtypePolicy
from ernie_jax.nn.mlp import GatedMLP
from ernie_jax.sharding import constrain


class MoE(nnx.Module):
    """Routed experts of each modality, isolated from one another, plus one shared MLP for every token.

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
        self.compute = compute
        self.hidden_act = config.hidden_act

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

    def stacks(self) -> tuple[ExpertStack | QuantizedExperts | None, ...]:
        """For text and, in a vision-language model, vision: the experts of a stack of these layers (see `Experts.stack`)."""
        return tuple(experts.stack() for experts in (self.experts, self.vision_experts) if experts is not None)

    def __call__(
        self,
        x: jax.Array,
        valid: jax.Array,
        modality: jax.Array | None = None,
        stacks: Sequence[ExpertStack | QuantizedExperts | None] | None = None,
        *,
        with_logits: bool = False,
    ) -> tuple[jax.Array, RouterOutput]:
        """Each token through the experts of its modality, and through the shared experts.

        Args:
          x: [B, T, D], normalised.
          valid: [B, T] bool; padding is routed nowhere and counted nowhere (the shared experts still see it).
          modality: [B, T] bool, true for tokens of images and videos (their start and end markers too); None for text alone,
            which costs nothing of the vision experts.
          stacks: the experts' weights where they are kept, to read them in place; as `stacks` gives them.
          with_logits: keep the raw router scores in the output, each token's of its own modality.

        Returns:
          ([B, T, D], what the router did).
        """
        stacks = (None, None) if stacks is None else stacks
        with jax.named_scope("router"):
            if modality is None:
                routing, output = self._text(x, valid)
                sets = [self.experts]
            else:
                routing, output = self._mixed(x, valid, modality)
                assert self.vision_experts is not None
                sets = [self.experts, self.vision_experts]
        y, counts = apply_experts(x, routing, sets, stacks[: len(sets)], self.compute, self.hidden_act)
        output = output.with_fp8(counts)
        y = constrain(y, "batch", "sequence", "activation_embed")
        if self.shared_experts is not None:
            with jax.named_scope("shared_experts"):
                y = y + self.shared_experts(x)
        return y, output if with_logits else replace(output, logits=None)

    def _text(self, x: jax.Array, valid: jax.Array) -> tuple[Routing, RouterOutput]:
        routing, logits, probabilities = self.router(x)
        routing, stats = self._admit(routing, logits, probabilities, valid, 0, self.num_experts)
        return routing, RouterOutput(stats, logits)

    def _mixed(self, x: jax.Array, valid: jax.Array, modality: jax.Array) -> tuple[Routing, RouterOutput]:
        """Both gates score every token, which is cheap, and a token keeps the scores and the bias of its own."""
        assert self.vision_router is not None
        text, vision = self.router, self.vision_router
        own = modality[..., None]
        logits = checkpoint_name(jnp.where(own, vision.logits(x), text.logits(x)), "router")
        bias = jnp.where(own, vision.bias[...], text.bias[...])
        routing, probabilities = route(logits, bias, self.k, norm_min=text.norm_min, temperature=text.temperature)
        nowhere = 2 * self.num_experts
        routings, stats = [], []
        for first, mask in ((0, valid & ~modality), (self.num_experts, valid & modality)):
            part, counted = self._admit(routing, logits, probabilities, mask, first, nowhere)
            routings.append(part)
            stats.append(counted)
        # A token is in one part and goes nowhere, with weight 0, in the other.
        merged = Routing(jnp.minimum(routings[0].expert_index, routings[1].expert_index), routings[0].weights + routings[1].weights)
        return merged, RouterOutput(stats[0], logits, stats[1])

    def _admit(
        self, routing: Routing, logits: jax.Array, probabilities: jax.Array, valid: jax.Array, first: int, nowhere: int
    ) -> tuple[Routing, RouterStats]:
        """The routing of the valid tokens alone, after capacity, its experts numbered from `first`; and what there is to count."""
        routing = drop_padding(routing, valid, self.num_experts)
        dropped = jnp.zeros((), jnp.float32)
        if self.compute.capacity_factor is not None:
            routing, dropped = apply_capacity(routing, valid, self.num_experts, self.compute.capacity_factor)
        stats = router_stats(logits, probabilities, routing, valid, self.k, dropped)
        index = jnp.where(routing.expert_index < self.num_experts, routing.expert_index + first, nowhere)
        return Routing(index, routing.weights), stats
