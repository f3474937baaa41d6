"""Multi-token prediction: blocks behind the decoder that predict further tokens, in training alone.

B batch, T tokens, D model, N blocks. Block i (0 first) turns the stream h behind the decoder, or behind the block before it, into

    u = W_i concat(RMS_emb_i(Embed[token t + i + 1]), RMS_hid_i(h)),    h = Layer_i(u)

of which the model's own final norm and head make logits of token t + i + 2 (ERNIE 4.5's reference code, DeepSeek-V3 section
2.2). Its layer is a dense one, with the positions and the mask of the model's other layers. At a place whose token t + i + 1 is
of another document nothing of use comes out and nothing is scored; later places of its document, which see it, are such places
too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ernie_jax.config.compute import ComputeConfig
from ernie_jax.config.model import ModelConfig
from ernie_jax.config.remat import remat_within
from ernie_jax.models.decoder import Collect, Context, DecoderLayer, kinds_of
from ernie_jax.nn.dtypes import DtypePolicy
from ernie_jax.nn.linear import Linear
from ernie_jax.nn.norm import RMSNorm
from ernie_jax.parallel import rematerialize
from ernie_jax.sharding import constrain


def shift_left(tokens: jax.Array, places: int) -> jax.Array:
    """[B, T] -> [B, T]: at each place what stands `places` further on in its row; the last ones begin the row again."""
    # Whole rows on every device: shifting a split row would send tokens between devices.
    return jnp.roll(constrain(tokens, "batch", "full_sequence"), -places, axis=1)


class MTPBlock(nnx.Module):
    """N blocks, every weight with a leading `layers` axis of N; called with the weights of one."""

    def __init__(self, config: ModelConfig, compute: ComputeConfig, *, rngs: nnx.Rngs) -> None:
        dim, stack = config.hidden_size, config.num_nextn_predict_layers
        dtypes = DtypePolicy.of(compute)
        self.embedding_norm = RMSNorm(dim, eps=config.rms_norm_eps, dtypes=dtypes, rngs=rngs, stack=stack)
        self.hidden_norm = RMSNorm(dim, eps=config.rms_norm_eps, dtypes=dtypes, rngs=rngs, stack=stack)
        self.projection = Linear(
            2 * dim,
            dim,
            # Not split over `tensor`: between layers every tensor shard has tokens of its own.
            axes=("embed", None),
            bias=False,
            initializer_range=config.initializer_range,
            dtypes=dtypes,
            rngs=rngs,
            stack=stack,
        )
        self.layer = DecoderLayer("dense", config, compute, rngs=rngs, stack=stack)

    def __call__(self, x: jax.Array, embedded: jax.Array, context: Context) -> jax.Array:
        """The stream and the embeddings of further tokens, both [B, T, D] -> the stream behind the block."""
        with jax.named_scope("mtp_projection"):
            both = jnp.concatenate([self.embedding_norm(embedded), self.hidden_norm(x)], axis=-1)
            u = constrain(self.projection(both), "batch", "sequence", "activation_embed")
        return self.layer(u, context, None, (), Collect())[0]


class MultiTokenPrediction(nnx.Module):
    """The chain of a model's `num_nextn_predict_layers` blocks; embedding, final norm and head are the model's."""

    def __init__(self, config: ModelConfig, compute: ComputeConfig, *, rngs: nnx.Rngs) -> None:
        compute = replace(compute, remat=remat_within(compute.remat, kinds_of(("dense",), config)))
        self.remat = compute.remat
        self.depth = config.num_nextn_predict_layers
        self.block = MTPBlock(config, compute, rngs=rngs)

    def __call__(self, x: jax.Array, embedded: jax.Array, context: Context) -> jax.Array:
        """The stream behind each block, before the final norm.

        Args:
          x: [B, T, D], behind the decoder, before the final norm.
          embedded: [N, B, T, D], of the tokens 1, 2, ... places further on.
          context: of the decoder's layers.

        Returns:
          [N, B, T, D].
        """
        graphdef, state = nnx.split(self.block)

        def block(x: jax.Array, weights: Any, embedded: jax.Array, context: Context) -> jax.Array:
            y: jax.Array = nnx.merge(graphdef, weights)(x, embedded, context)
            return y

        remade = rematerialize(block, self.remat, repeats=self.depth)

        def step(x: jax.Array, xs: Any) -> tuple[jax.Array, jax.Array]:
            y = remade(x, *xs, context)
            return y, y

        streams: jax.Array = jax.lax.scan(step, x, (state, embedded))[1]
        return streams
