"""Parameter counts by formula: D hidden, V vocabulary, F expert width, E experts, K chosen, S shared experts.

The same numbers come from `jax.eval_shape` of the model classes; tests compare the two.
"""

from __future__ import annotations

from dataclasses import dataclass

from ernie_jax.config.model import ModelConfig, VisionConfig


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters.

    Attributes:
      total: all of the model, without multi-token-prediction blocks.
      active: those a text token uses: everything but the routed experts that it does not choose and all that only images use
        (an untied input table counts, as in the published 47.9 B and 3.35 B).
      embedding: input table and, if untied, output head.
      mtp: the multi-token-prediction blocks, where the recipe has them.
    """

    total: int
    active: int
    embedding: int
    mtp: int


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Exact parameter counts of a model shape."""
    hidden, moe = config.hidden_size, config.moe
    embedding = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    width = config.head_dim
    attention = 2 * hidden * config.num_attention_heads * width + 2 * hidden * config.num_key_value_heads * width
    dense = 3 * hidden * config.intermediate_size
    total = embedding + hidden + config.num_hidden_layers * (attention + 2 * hidden)
    total += config.layer_kinds.count("dense") * dense
    active = total
    if moe is not None:
        gate = moe.num_experts * hidden + moe.num_experts
        shared = 3 * hidden * moe.shared_intermediate_size
        expert = 3 * hidden * moe.intermediate_size
        layers = config.num_moe_layers
        total += layers * (gate + shared + moe.num_experts * expert)
        active += layers * (gate + shared + moe.num_experts_per_tok * expert)
        if moe.vision_intermediate_size is not None:
            total += layers * (gate + moe.num_experts * 3 * hidden * moe.vision_intermediate_size)
    if config.vision is not None:
        total += _vision_tower(config.vision) + _resampler(config.vision, hidden)
    mtp = config.num_nextn_predict_layers * (attention + dense + 2 * hidden * hidden + 4 * hidden)
    return ParameterCount(total=total, active=active, embedding=embedding, mtp=mtp)


def _vision_tower(vision: VisionConfig) -> int:
    dim, width = vision.hidden_size, vision.intermediate_size
    patch = vision.in_channels * vision.patch_size**2 * dim
    block = (4 * dim * dim + 4 * dim) + (2 * dim * width + width + dim) + 4 * dim
    return patch + vision.depth * block + 2 * dim


def _resampler(vision: VisionConfig, hidden: int) -> int:
    merged = vision.hidden_size * vision.spatial_merge_size**2
    square = merged * merged + merged
    spatial = 2 * square + 2 * merged
    temporal = (2 * merged * merged + merged) + square + 2 * merged
    return spatial + temporal + (merged * hidden + hidden) + hidden
