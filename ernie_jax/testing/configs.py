"""Tiny models for tests, benches and notebooks: every part of ERNIE 4.5 at sizes a laptop compiles in a second."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ernie_jax.config import ModelConfig, MoEConfig
from ernie_jax.config.model import VisionConfig


def tiny_moe(**changes: Any) -> ModelConfig:
    """Three layers, the first dense; 8 experts, 3 chosen, 1 shared. `changes` are fields of ModelConfig or MoEConfig."""
    moe = MoEConfig(num_experts=8, num_experts_per_tok=3, intermediate_size=16, num_shared_experts=1, layer_start=1)
    config = ModelConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        # Large enough that routers are not near ties and gradients are not tiny.
        initializer_range=0.2,
        moe=moe,
    )
    own = {name: value for name, value in changes.items() if hasattr(config, name)}
    return replace(config, moe=replace(moe, **{k: v for k, v in changes.items() if k not in own}), **own)


def tiny_dense(**changes: Any) -> ModelConfig:
    """Two dense layers with a head width that is not hidden_size / heads, as in 0.3B."""
    return replace(tiny_moe(), moe=None, num_hidden_layers=2, head_dim=16, **changes)


def tiny_vl(**changes: Any) -> ModelConfig:
    """`tiny_moe` with vision experts of half the width, a tower of two blocks on patches of 2 x 2, and 3D positions."""
    vision = VisionConfig(
        depth=2,
        hidden_size=16,
        num_heads=2,
        intermediate_size=32,
        patch_size=2,
        initializer_range=0.1,
        image_token_id=58,
        image_start_token_id=59,
        image_end_token_id=60,
        video_token_id=61,
        video_start_token_id=62,
        video_end_token_id=63,
    )
    return replace(tiny_moe(vision_intermediate_size=8, **changes), mrope_section=(1, 1, 2), vision=vision)
