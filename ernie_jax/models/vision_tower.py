"""The vision tower: patches of images and video frames to features. G devices' shares, n patches of a share, C patch values,
D width, h heads, d head width.

Images of any size stand one after another in a share; attention is within one frame (`segment_ids`), positions are
two-dimensional, rotated pairs are half-split.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ernie_jax.config.compute import ComputeConfig
from ernie_jax.config.model import VisionConfig
from ernie_jax.config.remat import remat_within
from ernie_jax.nn.activation import ACTIVATION_FUNCTIONS
from ernie_jax.nn.attention_kernels import AttentionMask, attend, choose_implementation, fits_natively
from ernie_jax.nn.dtypes import DtypePolicy
from ernie_jax.nn.linear import Linear
from ernie_jax.nn.norm import LayerNorm
from ernie_jax.nn.rope import inverse_frequencies, rotate_half_split
from ernie_jax.parallel import rematerialize


class VisionBlock(nnx.Module):
    """Pre-norm block: attention within a frame, then an MLP; biases everywhere."""

    def __init__(self, config: VisionConfig, compute: ComputeConfig, *, rngs: nnx.Rngs, stack: int) -> None:
        dtypes = DtypePolicy.of(compute)
        self.compute = compute
        self.num_heads = config.num_heads
        self.hidden_act = config.hidden_act
        dim, width = config.hidden_size, config.intermediate_size

        def norm() -> LayerNorm:
            return LayerNorm(dim, eps=config.rms_norm_eps, dtypes=dtypes, rngs=rngs, stack=stack)

        def linear(inputs: int, outputs: int, axes: tuple[str, str]) -> Linear:
            init = config.initializer_range
            return Linear(inputs, outputs, axes=axes, initializer_range=init, dtypes=dtypes, rngs=rngs, stack=stack)

        self.norm1 = norm()
        self.qkv = linear(dim, 3 * dim, ("vision_embed", "vision_heads"))
        self.proj = linear(dim, dim, ("vision_heads", "vision_embed"))
        self.norm2 = norm()
        self.fc1 = linear(dim, width, ("vision_embed", "vision_mlp"))
        self.fc2 = linear(width, dim, ("vision_mlp", "vision_embed"))

    def __call__(self, x: jax.Array, rope: tuple[jax.Array, jax.Array], mask: AttentionMask) -> jax.Array:
        """[G, n, D] -> [G, n, D]."""
        qkv = checkpoint_name(self.qkv(self.norm1(x)), "vit_qkv").reshape(*x.shape[:2], 3, self.num_heads, -1)
        q, k, v = rotate_half_split(qkv[:, :, 0], *rope), rotate_half_split(qkv[:, :, 1], *rope), qkv[:, :, 2]
        implementation = choose_implementation(
            self.compute.attention,
            query_length=x.shape[1],
            backend=jax.default_backend(),
            chunk_from=self.compute.attention_chunk_from,
            dtype=q.dtype,
            # On a mesh the layout of images is the compiler's to choose.
            native=fits_natively(q, k, on_meshes=False),
        )
        attended = attend(q, k, v, mask, implementation=implementation, chunk=self.compute.attention_chunk, tag="vit_attn")
        x = checkpoint_name(x + self.proj(attended.reshape(x.shape)), "vit_residual")
        hidden = checkpoint_name(self.fc1(self.norm2(x)), "vit_act")
        return x + self.fc2(ACTIVATION_FUNCTIONS[self.hidden_act](hidden))


class VisionTower(nnx.Module):
    """Patch embedding, a scanned stack of blocks, final norm."""

    def __init__(self, config: VisionConfig, compute: ComputeConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.remat = remat_within(compute.remat, ("vision_block",))
        self.dtypes = DtypePolicy.of(compute)
        patch = config.in_channels * config.patch_size**2
        self.patch_embed = Linear(
            patch,
            config.hidden_size,
            axes=(None, "vision_embed"),
            bias=False,
            initializer_range=config.initializer_range,
            dtypes=self.dtypes,
            rngs=rngs,
        )
        self.blocks = VisionBlock(config, compute, rngs=rngs, stack=config.depth)
        self.norm = LayerNorm(config.hidden_size, eps=config.rms_norm_eps, dtypes=self.dtypes, rngs=rngs)

    def __call__(self, pixel_values: jax.Array, segment_ids: jax.Array, position_ids: jax.Array) -> jax.Array:
        """Features of patches.

        Args:
          pixel_values: [G, n, C], normalised.
          segment_ids: [G, n], equal within a frame, 0 at padding.
          position_ids: [G, n, 2] row and column of each patch in its frame.

        Returns:
          [G, n, D].
        """
        x = self.patch_embed(self.dtypes.cast(pixel_values))
        # Half of the rotated pairs turn by the row, half by the column.
        frequencies = inverse_frequencies(x.shape[-1] // self.config.num_heads // 2, self.config.rope_theta)
        angles = (position_ids.astype(jnp.float32)[..., None] * frequencies).reshape(*x.shape[:2], -1)
        rope = jnp.cos(angles), jnp.sin(angles)
        mask = AttentionMask.bidirectional(segment_ids)
        graphdef, state = nnx.split(self.blocks)

        def block(x: jax.Array, weights: nnx.State) -> jax.Array:
            layer: VisionBlock = nnx.merge(graphdef, weights)
            return layer(x, rope, mask)

        run = rematerialize(block, self.remat, repeats=self.config.depth)
        x, _ = jax.lax.scan(lambda x, weights: (run(x, weights), None), x, state)
        return self.norm(x)
