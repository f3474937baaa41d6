"""The decoder: layers of one kind stacked and scanned. B batch, T tokens, D model, R repeats of a segment's unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ernie_jax.config.compute import ComputeConfig
from ernie_jax.config.model import ModelConfig
from ernie_jax.config.remat import remat_within
from ernie_jax.config.segments import Segment, segments_of
from ernie_jax.moe import MoE, RouterOutput
from ernie_jax.nn.attention import Attention
from ernie_jax.nn.attention_kernels import AttentionMask
from ernie_jax.nn.dtypes import DtypePolicy
from ernie_jax.nn.kv_cache import KVCache, LayerCache
from ernie_jax.nn.mlp import GatedMLP
from ernie_jax.nn.norm import RMSNorm
from ernie_jax.parallel import rematerialize
from ernie_jax.sharding import constrain


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """What every layer of a pass shares: rotary tables, attention mask, [B, T] bool of valid tokens, first cache slot, and
    [B, T] bool of image and video tokens (None: there are none)."""

    rope: tuple[jax.Array, jax.Array]
    mask: AttentionMask
    valid: jax.Array
    index: jax.Array | None = None
    modality: jax.Array | None = None

    def last(self) -> Context:
        """What of this concerns each row's last token."""
        rope = (self.rope[0][:, -1:], self.rope[1][:, -1:])
        modality = None if self.modality is None else self.modality[:, -1:]
        return replace(self, rope=rope, mask=self.mask.last(), valid=self.valid[:, -1:], modality=modality)


@dataclass(frozen=True)
class Collect:
    """What a pass keeps: more than its result, or of it each row's last token alone, [B, 1, D], and no router output."""

    router_logits: bool = False
    hidden_states: bool = False
    last_only: bool = False


class DecoderLayer(nnx.Module):
    """Pre-norm block: attention, then a dense MLP or a mixture of experts, each added to the stream."""

    def __init__(self, kind: str, config: ModelConfig, compute: ComputeConfig, *, rngs: nnx.Rngs, stack: int | None = None) -> None:
        dtypes = DtypePolicy.of(compute)

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtypes=dtypes, rngs=rngs, stack=stack)

        self.input_norm = norm()
        self.attention = Attention(config, compute, rngs=rngs, stack=stack)
        self.post_attention_norm = norm()
        self.moe = MoE(config, compute, rngs=rngs, stack=stack) if kind == "moe" else None
        self.mlp = (
            GatedMLP(
                config.hidden_size,
                config.intermediate_size,
                hidden_act=config.hidden_act,
                initializer_range=config.initializer_range,
                dtypes=dtypes,
                rngs=rngs,
                stack=stack,
            )
            if kind == "dense"
            else None
        )

    def __call__(
        self, x: jax.Array, context: Context, cache: LayerCache | None, stacks: Any, collect: Collect
    ) -> tuple[jax.Array, LayerCache | None, RouterOutput | None]:
        """[B, T, D] -> ([B, T, D], the cache, what the router did or None for a dense layer); `stacks`: experts in place.

        With `collect.last_only` all tokens are keys and values, and the result is that of the last: [B, 1, D].
        """
        rope = context.rope
        if collect.last_only:
            context = context.last()
        with jax.named_scope("attention"):
            attended, cache = self.attention(self.input_norm(x), rope, context.mask, cache, context.index)
            x = checkpoint_name(x[:, -attended.shape[1] :] + attended, "residual")
        normed = self.post_attention_norm(x)
        router = None
        if self.moe is not None:
            with jax.named_scope("moe"):
                y, router = self.moe(normed, context.valid, context.modality, stacks, with_logits=collect.router_logits)
        else:
            assert self.mlp is not None
            with jax.named_scope("mlp"):
                y = self.mlp(normed)
        return checkpoint_name(constrain(x + y, "batch", "sequence", "activation_embed"), "residual"), cache, router


def kinds_of(unit: Sequence[str], config: ModelConfig) -> tuple[str, ...]:
    """The kinds of blocks, as rematerialisation tells them apart, in a unit of `dense` and `moe` layers."""
    kinds = ["attention"]
    moe = config.moe
    if "dense" in unit or (moe is not None and moe.num_shared_experts):
        kinds.append("mlp")
    if "moe" in unit:
        assert moe is not None
        kinds += ["exchange", "experts"] + ["vision_experts"] * (moe.vision_intermediate_size is not None)
    return tuple(kinds)


class DecoderSegment(nnx.Module):
    """R repetitions of a unit of layers, every weight with a leading `layers` axis of R, run by one scan."""

    def __init__(self, plan: Segment, config: ModelConfig, compute: ComputeConfig, *, rngs: nnx.Rngs) -> None:
        self.plan = plan
        # A segment that a policy leaves alone runs as with `none`, its exchange included.
        compute = replace(compute, remat=remat_within(compute.remat, kinds_of(plan.unit, config)))
        self.remat = compute.remat
        # With a limit on an expert's load, who else is in a row decides whether a token is dropped.
        self.can_narrow = compute.capacity_factor is None
        self.layers = nnx.List([DecoderLayer(kind, config, compute, rngs=rngs, stack=plan.repeats) for kind in plan.unit])

    def __call__(
        self, x: jax.Array, context: Context, caches: tuple[LayerCache, ...] | None, collect: Collect
    ) -> tuple[jax.Array, tuple[LayerCache, ...] | None, list[RouterOutput], list[jax.Array]]:
        """Run all repetitions: (x, caches, router outputs in layer order, hidden states in layer order)."""
        x, new_caches, routers, hidden = self.run(x, context, caches, collect)
        repeats, places = range(self.plan.repeats), range(len(self.plan.unit))
        return (
            x,
            new_caches,
            [jax.tree.map(lambda a, r=r: a[r], routers[i]) for r in repeats for i in places if routers[i] is not None],
            [states[r] for r in repeats for states in hidden if states is not None],
        )

    def run(
        self,
        x: jax.Array,
        context: Context,
        caches: tuple[LayerCache, ...] | None,
        collect: Collect,
        count: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[LayerCache, ...] | None, tuple[RouterOutput | None, ...], tuple[jax.Array | None, ...]]:
        """Run as many repetitions as the weights have, be it all or those of a pipeline stage.

        Args:
          x: [B, T, D].
          context: what layers share.
          caches: of each layer of the unit, None without.
          collect: what to keep; with `last_only` the last layer is computed for each row's last token alone (inference only).
          count: int32 scalar, run only so many of the repetitions (without caches); None for all.

        Returns:
          (x, caches, router outputs and hidden states of each layer of the unit, with a leading axis of repetitions; of those
          that were not run, zeros).
        """
        graphdef, state = nnx.split(self.layers)
        # Gradients go to a layer's own weights; of the stacks, behind a branch, they would be so many zeros.
        stacks = jax.lax.stop_gradient([() if layer.moe is None else layer.moe.stacks() for layer in self.layers])
        repeats = len(jax.tree.leaves(state)[0])

        def unit(
            x: jax.Array, caches: Any, weights: Any, repeat: jax.Array, stacks: Any, context: Context, last: bool = False
        ) -> tuple[Any, Any]:
            layers = nnx.merge(graphdef, weights)
            new_caches, routers, hidden = [], [], []
            for i, layer in enumerate(layers):
                cache = None if caches is None else caches[i].at(repeat)
                own = [None if stack is None else stack.at(repeat) for stack in stacks[i]]
                x, cache, router = layer(x, context, cache, own, replace(collect, last_only=last and i == len(layers) - 1))
                new_caches.append(None if cache is None else cache.at(None))
                routers.append(router)
                hidden.append(x if collect.hidden_states else None)
            return (x, None if caches is None else tuple(new_caches)), (tuple(routers), tuple(hidden))

        def body(x: jax.Array, caches: Any, weights: Any, repeat: jax.Array, stacks: Any, context: Context) -> tuple[Any, Any]:
            if count is None:
                return unit(x, caches, weights, repeat, stacks, context)

            def active() -> tuple[Any, Any]:
                return unit(x, caches, weights, repeat, stacks, context)

            kept = jax.eval_shape(active)[1]
            # All devices of a stage have the same count, so collectives in the layers are met by all they wait for.
            result: tuple[Any, Any] = jax.lax.cond(
                repeat < count,
                active,
                lambda: ((x, caches), jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), kept)),
            )
            return result

        # Around the branch: from inside it, all that its backward pass reads would be kept anew in each round, the stacks too.
        remade = rematerialize(body, self.remat, repeats=repeats, branches=count is not None)

        def step(carry: Any, xs: Any) -> tuple[Any, Any]:
            return remade(*carry, *xs, stacks, context)

        if collect.last_only and self.can_narrow and x.shape[1] > 1:
            return self._narrowed(x, caches, unit, state, stacks, context)
        (x, new_caches), (routers, hidden) = jax.lax.scan(step, (x, caches), (state, jnp.arange(repeats, dtype=jnp.int32)))
        return x, new_caches, routers, hidden

    def _narrowed(
        self, x: jax.Array, caches: Any, unit: Callable[..., tuple[Any, Any]], state: Any, stacks: Any, context: Context
    ) -> tuple[jax.Array, Any, tuple[None, ...], tuple[None, ...]]:
        """All repetitions, the last apart from the loop; its last layer goes on with each row's last token."""
        repeats, nothing = len(jax.tree.leaves(state)[0]), (None,) * len(self.plan.unit)

        def run(x: jax.Array, caches: Any, repeat: jax.Array, last: bool) -> Any:
            # Read from the stack of all layers: one without the last would be a copy.
            weights = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, repeat, keepdims=False), state)
            return unit(x, caches, weights, repeat, stacks, context, last)[0]

        carry, _ = jax.lax.scan(lambda c, r: (run(*c, r, False), None), (x, caches), jnp.arange(repeats - 1, dtype=jnp.int32))
        x, caches = run(*carry, jnp.int32(repeats - 1), True)
        return x, caches, nothing, nothing


class Decoder(nnx.Module):
    """All segments of a model, in order."""

    def __init__(self, config: ModelConfig, compute: ComputeConfig, *, rngs: nnx.Rngs) -> None:
        self.segments = nnx.List([DecoderSegment(plan, config, compute, rngs=rngs) for plan in segments_of(config)])

    def __call__(
        self, x: jax.Array, context: Context, cache: KVCache | None = None, collect: Collect = Collect()
    ) -> tuple[jax.Array, KVCache | None, tuple[RouterOutput, ...], tuple[jax.Array, ...]]:
        """[B, T, D] -> (hidden states before the final norm, cache, router outputs of MoE layers, hidden states of layers)."""
        caches: list[tuple[LayerCache, ...]] = []
        routers: list[RouterOutput] = []
        hidden: list[jax.Array] = []
        tokens = x.shape[1]
        for i, segment in enumerate(self.segments):
            own = replace(collect, last_only=collect.last_only and i == len(self.segments) - 1)
            x, layer_caches, outputs, states = segment(x, context, None if cache is None else cache.segments[i], own)
            if layer_caches is not None:
                caches.append(layer_caches)
            routers += outputs
            hidden += states
        if cache is not None:
            cache = replace(cache, segments=tuple(caches)).advance(tokens)
        return x, cache, tuple(routers), tuple(hidden)
