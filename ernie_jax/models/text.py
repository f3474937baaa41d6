"""The text model: embedding, decoder, final norm, output head. B batch, T tokens, D model, V vocabulary."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ernie_jax.config.compute import ComputeConfig
from ernie_jax.config.model import ModelConfig
from ernie_jax.models.decoder import Collect, Context, Decoder
from ernie_jax.models.inputs import TextInputs, text_inputs
from ernie_jax.models.mtp import MultiTokenPrediction, shift_left
from ernie_jax.models.output import ModelOutput
from ernie_jax.moe import RouterOutput
from ernie_jax.nn.dtypes import DtypePolicy
from ernie_jax.nn.embedding import Embedding, Head, project_to_vocabulary
from ernie_jax.nn.kv_cache import KVCache
from ernie_jax.nn.norm import RMSNorm
from ernie_jax.nn.rope import rope_tables
from ernie_jax.sharding import Layout, constrain, use_layout


class TextModel(nnx.Module):
    """A dense or mixture-of-experts ERNIE 4.5 language model.

    Attributes:
      config: its shape.
      compute: how it is run.
      layout: mesh and rules it runs on, None for one device.
      mtp: blocks of multi-token prediction, for training alone: logits do not use them. None where the config has none or
        `compute.mtp` does not ask for them.

    Raises:
      ValueError: multi-token prediction of a vision-language model.
    """

    def __init__(
        self, config: ModelConfig, compute: ComputeConfig = ComputeConfig(), *, layout: Layout | None = None, rngs: nnx.Rngs
    ) -> None:
        self.config = config
        self.compute = compute
        self.layout = layout
        self.dtypes = DtypePolicy.of(compute)
        table: dict[str, Any] = {"initializer_range": config.initializer_range, "dtypes": self.dtypes, "rngs": rngs}
        self.embed = Embedding(config.vocab_size, config.hidden_size, **table)
        self.decoder = Decoder(config, compute, rngs=rngs)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtypes=self.dtypes, rngs=rngs)
        self.lm_head = None if config.tie_word_embeddings else Head(config.vocab_size, config.hidden_size, **table)
        wanted = compute.mtp and config.num_nextn_predict_layers > 0
        if wanted and config.vision is not None:
            raise ValueError(
                f"num_nextn_predict_layers={config.num_nextn_predict_layers} of a vision-language model, and compute.mtp asks for "
                "the blocks; multi-token prediction is of text models alone, as published: set one of the two to none"
            )
        # Last, so that the other weights drawn from a seed are the same with it and without.
        self.mtp = MultiTokenPrediction(config, compute, rngs=rngs) if wanted else None

    @property
    def head_kernel(self) -> jax.Array:
        """The [V, D] matrix that makes logits: the head's own, or the tied embedding."""
        return (self.embed.embedding if self.lm_head is None else self.lm_head.kernel)[...]

    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        position_ids: jax.Array | None = None,
        *,
        cache: KVCache | None = None,
        output_hidden_states: bool = False,
    ) -> ModelOutput:
        """Logits of every position.

        Args:
          input_ids: [B, T] integers below the vocabulary size.
          attention_mask: [B, T], 0 at padding (left or right).
          segment_ids: [B, T], equal numbers see each other, 0 is padding; for packed documents.
          position_ids: [B, T]; counts from 0 (from the cache's position when there is one), whatever the mask, by default.
          cache: continue from these keys and values; its write position moves on in the returned cache.
          output_hidden_states: also return embeddings and each layer's output.

        Returns:
          ModelOutput with logits [B, T, V] float32 and, for each MoE layer, router scores and load.

        Raises:
          ValueError: shapes or values that do not fit, a full cache.
        """
        inputs = text_inputs(self.config, input_ids, attention_mask, segment_ids, position_ids, cache)
        collect = Collect(router_logits=True, hidden_states=output_hidden_states)
        return self.run(inputs, cache, collect)

    def run(self, inputs: TextInputs, cache: KVCache | None, collect: Collect) -> ModelOutput:
        """`forward`, compiled where it is not inside a compilation already."""
        if isinstance(inputs.input_ids, jax.core.Tracer):
            return self.forward(inputs, cache, collect)
        graphdef, state = nnx.split(self)
        return _compiled_forward(graphdef, state, inputs, cache, collect)

    def forward(self, inputs: TextInputs, cache: KVCache | None = None, collect: Collect = Collect()) -> ModelOutput:
        """The pass itself, for use inside jit: logits of every position of checked inputs."""
        with use_layout(self.layout):
            hidden, cache, router, states = self._hidden(inputs, cache, collect)
            logits = project_to_vocabulary(hidden, self.head_kernel, self.dtypes)
            return ModelOutput(logits, router, states if collect.hidden_states else None, cache)

    def next_logits(self, inputs: TextInputs, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Logits [B, V] after the last of the given tokens, and the cache with all of them: one step of generation."""
        with use_layout(self.layout):
            hidden, cache_out, _, _ = self._hidden(inputs, cache, Collect(last_only=True))
            assert cache_out is not None
            return project_to_vocabulary(hidden[:, -1:], self.head_kernel, self.dtypes)[:, 0], cache_out

    def hidden(self, inputs: TextInputs) -> tuple[jax.Array, tuple[RouterOutput, ...]]:
        """Normed hidden states [B, T, D] and router outputs, without the head: what a chunked loss starts from."""
        with use_layout(self.layout):
            hidden, _, router, _ = self._hidden(inputs, None, Collect())
            return hidden, router

    def stream(self, inputs: TextInputs) -> tuple[jax.Array, tuple[RouterOutput, ...]]:
        """Hidden states [B, T, D] before the final norm and router outputs: what `hidden` norms, `further_hidden` goes on from."""
        with use_layout(self.layout):
            x, _, router, _ = self._stream(inputs, None, Collect())
            return x, router

    def further_hidden(self, stream: jax.Array, inputs: TextInputs) -> jax.Array:
        """Normed hidden states [N, B, T, D] of the N blocks of multi-token prediction; of block i the head makes logits of the
        token i + 2 places further on.

        Args:
          stream: [B, T, D], as `stream` gives it for these inputs.
          inputs: the tokens.
        """
        assert self.mtp is not None
        with use_layout(self.layout), jax.named_scope("mtp"):
            embedded = [self.embed(shift_left(inputs.input_ids, i + 1)) for i in range(self.mtp.depth)]
            return self.norm(self.mtp(stream, jnp.stack(embedded), self.context(inputs)))

    def features(self, inputs: TextInputs) -> jax.Array | None:
        """What takes the place of token embeddings, computed by devices of all pipeline stages together; None for nothing."""
        return None

    def embedded(self, inputs: TextInputs, features: jax.Array | None) -> jax.Array:
        """What the decoder starts from, [B, T, D]: token embeddings, and the given `features` of these inputs."""
        return self.embed(inputs.input_ids)

    def context(self, inputs: TextInputs, cache: KVCache | None = None) -> Context:
        """What every layer shares; of the model's own it uses no weight."""
        valid = constrain(inputs.segment_ids != 0, "batch", None)
        index = None if cache is None else cache.index
        return Context(self._rope(inputs.position_ids), inputs.mask(cache), valid, index, inputs.modality)

    def _rope(self, position_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Rotary tables [B, T, d / 2] of the positions."""
        return rope_tables(position_ids, self.config.head_dim, self.config.rope_theta)

    def _stream(
        self, inputs: TextInputs, cache: KVCache | None, collect: Collect
    ) -> tuple[jax.Array, KVCache | None, tuple[RouterOutput, ...], tuple[jax.Array, ...]]:
        features = self.features(inputs)
        with jax.named_scope("embed"):
            x = self.embedded(inputs, features)
        if cache is not None:
            cache = cache.admit(inputs.segment_ids)
        context = self.context(inputs, cache)
        embedded = x
        x, cache, router, states = self.decoder(x, context, cache, collect)
        if cache is not None and inputs.position_ids.ndim == 3:
            cache = cache.continue_at(inputs.position_ids.max(axis=(1, 2)) + 1)
        return x, cache, router, (embedded, *states) if collect.hidden_states else ()

    def _hidden(
        self, inputs: TextInputs, cache: KVCache | None, collect: Collect
    ) -> tuple[jax.Array, KVCache | None, tuple[RouterOutput, ...], tuple[jax.Array, ...]]:
        x, cache, router, states = self._stream(inputs, cache, collect)
        x = self.norm(x)
        return x, cache, router, (*states[:-1], x) if collect.hidden_states else ()


@functools.partial(jax.jit, static_argnums=(0, 4))
def _compiled_forward(graphdef: Any, state: Any, inputs: TextInputs, cache: KVCache | None, collect: Collect) -> ModelOutput:
    model: TextModel = nnx.merge(graphdef, state)
    return model.forward(inputs, cache, collect)
