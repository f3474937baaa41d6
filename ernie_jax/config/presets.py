"""The published sizes, and the small model of the quick start.

Values: configuration classes and checkpoints of ERNIE 4.5 (0.3B, 21B-A3B, 300B-A47B, VL-28B-A3B, VL-424B-A47B). The vision
expert width of the 424B model is derived from its published parameter count.
"""

from __future__ import annotations

from dataclasses import replace

from ernie_jax.config.model import ModelConfig, MoEConfig, VisionConfig
from ernie_jax.config.nearest import did_you_mean

_A3B = ModelConfig(
    vocab_size=103424,
    hidden_size=2560,
    intermediate_size=12288,
    num_hidden_layers=28,
    num_attention_heads=20,
    num_key_value_heads=4,
    head_dim=128,
    tie_word_embeddings=True,
    num_nextn_predict_layers=1,
    moe=MoEConfig(
        num_experts=64,
        num_experts_per_tok=6,
        intermediate_size=1536,
        num_shared_experts=2,
        layer_start=1,
    ),
)

_A47B = ModelConfig(
    vocab_size=103424,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=54,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=False,
    num_nextn_predict_layers=1,
    moe=MoEConfig(
        num_experts=64,
        num_experts_per_tok=8,
        intermediate_size=3584,
        layer_start=3,
    ),
)


def _with_vision(text: ModelConfig, vision_intermediate_size: int) -> ModelConfig:
    assert text.moe is not None
    return replace(
        text,
        num_nextn_predict_layers=0,
        mrope_section=(22, 22, 20),
        moe=replace(text.moe, vision_intermediate_size=vision_intermediate_size),
        vision=VisionConfig(),
    )


PRESETS: dict[str, ModelConfig] = {
    "ernie-4.5-0.3b": ModelConfig(
        vocab_size=103424,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=18,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=128,
        tie_word_embeddings=True,
    ),
    "ernie-4.5-21b-a3b": _A3B,
    "ernie-4.5-300b-a47b": _A47B,
    "ernie-4.5-vl-28b-a3b": _with_vision(_A3B, 512),
    "ernie-4.5-vl-424b-a47b": _with_vision(_A47B, 1536),
    "quickstart": ModelConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        initializer_range=0.02,
        moe=MoEConfig(
            num_experts=16,
            num_experts_per_tok=2,
            intermediate_size=128,
            num_shared_experts=1,
            layer_start=1,
        ),
    ),
    # Its tokenizer, trained on the spot, has the markers of images and videos behind its three special tokens.
    "quickstart-vl": ModelConfig(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        initializer_range=0.05,
        mrope_section=(6, 6, 4),
        moe=MoEConfig(
            num_experts=8,
            num_experts_per_tok=2,
            intermediate_size=128,
            num_shared_experts=1,
            layer_start=1,
            vision_intermediate_size=64,
        ),
        vision=VisionConfig(
            depth=3,
            hidden_size=64,
            num_heads=4,
            intermediate_size=256,
            patch_size=8,
            initializer_range=0.08,
            image_token_id=3,
            image_start_token_id=4,
            image_end_token_id=5,
            video_token_id=6,
            video_start_token_id=7,
            video_end_token_id=8,
        ),
    ),
}


def preset(name: str) -> ModelConfig:
    """The model shape called `name`.

    Raises:
      ValueError: an unknown name, with the nearest one and the list.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}{did_you_mean(name, PRESETS)}; there are {', '.join(PRESETS)}")
    return PRESETS[name]
