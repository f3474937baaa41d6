"""Grouped-query self attention with rotary positions. B batch, T tokens, D model, hq/hk query/kv heads, d head width."""

from __future__ import annotations

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ernie_jax.config.compute import ComputeConfig
from ernie_jax.config.model import ModelConfig
from ernie_jax.nn.attention_kernels import AttentionMask, attend, choose_implementation, fits_natively
from ernie_jax.nn.dtypes import DtypePolicy
from ernie_jax.nn.kv_cache import LayerCache
from ernie_jax.nn.parameter import Initializer, normal, parameter
from ernie_jax.nn.projection import project
from ernie_jax.nn.rope import rotate_interleaved
from ernie_jax.sharding import constrain, constrain_cotangent


class Attention(nnx.Module):
    """Causal attention of one decoder layer: no bias, no query/key norm, interleaved rotary pairs."""

    def __init__(self, config: ModelConfig, compute: ComputeConfig, *, rngs: nnx.Rngs, stack: int | None = None) -> None:
        self.compute = compute
        self.dtypes = DtypePolicy.of(compute)
        hidden, heads, kv_heads, width = (
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        init: Initializer = normal(config.initializer_range)

        def project(shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param:
            return parameter(rngs, shape, axes, init=init, dtype=self.dtypes.param, stack=stack)

        self.q_proj = project((hidden, heads, width), ("embed", "heads", "head_dim"))
        self.k_proj = project((hidden, kv_heads, width), ("embed", "kv_heads", "head_dim"))
        self.v_proj = project((hidden, kv_heads, width), ("embed", "kv_heads", "head_dim"))
        self.o_proj = project((heads, width, hidden), ("heads", "head_dim", "embed"))

    def __call__(
        self,
        x: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        mask: AttentionMask,
        cache: LayerCache | None = None,
        index: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Attend within x, or to a cache that x's keys and values enter first.

        Args:
          x: [B, T, D], normalised.
          rope: cosines and sines [B, T, d / 2] of x's positions.
          mask: who sees whom; over the cache's slots when there is one. With fewer queries than tokens, the last ask.
          cache: this layer's cache.
          index: the slot of x's first token in the cache.

        Returns:
          ([B, T, D] of the tokens that ask, the cache with x's keys and values, or None).
        """
        x = constrain(x, "batch", "full_sequence", "activation_embed")
        asking = mask.query_segment_ids.shape[1]
        q = self._heads(x[:, -asking:], self.q_proj, "activation_heads")
        k = self._heads(x, self.k_proj, "activation_kv_heads")
        v = self._heads(x, self.v_proj, "activation_kv_heads")
        q, k = rotate_interleaved(q, *(table[:, -asking:] for table in rope)), rotate_interleaved(k, *rope)
        q, k, v = (checkpoint_name(t, "qkv") for t in (q, k, v))
        if cache is not None:
            assert index is not None
            cache = cache.write(k, v, index)
            k, v = (a.astype(q.dtype) for a in cache.read())
        implementation = choose_implementation(
            self.compute.attention,
            query_length=q.shape[1],
            backend=jax.default_backend(),
            chunk_from=self.compute.attention_chunk_from,
            dtype=q.dtype,
            native=fits_natively(q, k),
        )
        out = attend(q, k, v, mask, implementation=implementation, chunk=self.compute.attention_chunk)
        out = constrain(out, "batch", "full_sequence", "activation_heads", None)
        y = project(out, self.dtypes.cast(self.o_proj[...]))
        y = constrain_cotangent(y, "batch", "full_sequence", "activation_embed")
        return constrain(y, "batch", "sequence", "activation_embed"), cache

    def _heads(self, x: jax.Array, kernel: nnx.Param, axis: str) -> jax.Array:
        heads = project(x, self.dtypes.cast(kernel[...]))
        return constrain(heads, "batch", "full_sequence", axis, None)
