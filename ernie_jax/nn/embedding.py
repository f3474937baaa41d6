"""Token embedding and output head. B batch, T tokens, D model, V vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ernie_jax.nn.dtypes import DtypePolicy
from ernie_jax.nn.parameter import normal, parameter
from ernie_jax.nn.projection import project_turned
from ernie_jax.sharding import constrain, constrain_in_stage, current_layout


class Embedding(nnx.Module):
    """A table [V, D] of token vectors; also the output head of models that tie the two."""

    def __init__(self, vocab_size: int, hidden_size: int, *, initializer_range: float, dtypes: DtypePolicy, rngs: nnx.Rngs) -> None:
        self.dtypes = dtypes
        self.embedding = parameter(
            rngs, (vocab_size, hidden_size), ("vocab", "embed"), init=normal(initializer_range), dtype=dtypes.param
        )

    def __call__(self, input_ids: jax.Array) -> jax.Array:
        """Integers [B, T] -> vectors [B, T, D] in the compute format."""
        # Every tensor shard looks all tokens up in its rows, and only the sum is split along the sequence. Left to itself the
        # partitioner shuffles tokens between shards first, by a permutation that on CPU waits for all devices, other stages' too.
        input_ids = constrain_in_stage(input_ids, "batch", "full_sequence")
        table, layout = self.embedding[...], current_layout()
        if layout is not None and layout.shards("vocab") > 1:
            # Rows whole, and so in the backward pass: where ZeRO keeps a table's gradient split along both axes, the partitioner of
            # jax 0.10 ends the process over the scatter that adds to it. Split along rows alone it is better left free: each
            # shard is then sent its columns of all tokens' cotangents, and not all of them.
            table = constrain_in_stage(table, "vocab", None)
        vectors = self.dtypes.cast(jnp.take(table, input_ids, axis=0))
        vectors = constrain_in_stage(vectors, "batch", "full_sequence", "activation_embed")
        return constrain(vectors, "batch", "sequence", "activation_embed")


class Head(nnx.Module):
    """An untied output head: kernel [V, D]."""

    def __init__(self, vocab_size: int, hidden_size: int, *, initializer_range: float, dtypes: DtypePolicy, rngs: nnx.Rngs) -> None:
        self.kernel = parameter(
            rngs, (vocab_size, hidden_size), ("vocab", "embed"), init=normal(initializer_range), dtype=dtypes.param
        )


def project_to_vocabulary(x: jax.Array, kernel: jax.Array, dtypes: DtypePolicy) -> jax.Array:
    """Logits [B, T, V] in float32 from hidden states [B, T, D] and a head (or tied table) [V, D]."""
    x = constrain(x, "batch", "full_sequence", "activation_embed")
    logits = project_turned(x, dtypes.cast(kernel))
    return constrain(logits, "batch", "full_sequence", "activation_vocab")
