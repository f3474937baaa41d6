"""The one table of Hugging Face weights: published name, our path, axes. Import and export both read it.

D hidden size, V vocabulary, h heads, d head width, F width of an MLP or expert, E experts.

`{layer}`, `{expert}`, `{vision_expert}`, `{block}` (of the vision tower) and `{mtp}` (a block of multi-token prediction) in a
published name run over the dimension of our array with that name; which number stands for which place is `NUMBERING`. Rows
whose path a model does not have do not apply to it, so a table covers every shape of its class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ernie_jax.config.model import ModelConfig
from ernie_jax.config.segments import Segment


@dataclass(frozen=True)
class Row:
    """One kind of published tensor.

    Attributes:
      hub: published name with places in braces.
      ours: path of the variable, with `{segment}` and `{unit}` for a stacked layer.
      axes: `"published axes -> our axes"`, see `AxisMap`.
      float32: published in float32 whatever the format of the other weights.
    """

    hub: str
    ours: str
    axes: str
    float32: bool = False


@dataclass(frozen=True)
class Stack:
    """Where an array with a `layer` dimension stands in the decoder."""

    segment: Segment
    unit: int


# Place along our dimension -> number in the published name.
NUMBERING: Mapping[str, Callable[[int, ModelConfig, Stack | None], int]] = {
    "layer": lambda place, config, stack: _layer_number(place, stack),
    "expert": lambda place, config, stack: place,
    # One published list holds both modalities: text experts first.
    "vision_expert": lambda place, config, stack: place + _num_experts(config),
    "block": lambda place, config, stack: place,
    "mtp": lambda place, config, stack: place,
}


def _layer_number(place: int, stack: Stack | None) -> int:
    assert stack is not None
    return stack.segment.layer_index(place, stack.unit)


def _num_experts(config: ModelConfig) -> int:
    assert config.moe is not None
    return config.moe.num_experts


_HUB = "model.layers.{layer}."
_OURS = "decoder/segments/{segment}/layers/{unit}/"


def _gated_mlp(hub: str, ours: str, stacked: str = "layer") -> tuple[Row, ...]:
    """The rows of one gated MLP: gate and up are halves 0 and 1 of one array."""
    return (
        Row(f"{hub}gate_proj.weight", f"{ours}gate_up", f"F D -> {stacked} D 0 F"),
        Row(f"{hub}up_proj.weight", f"{ours}gate_up", f"F D -> {stacked} D 1 F"),
        Row(f"{hub}down_proj.weight", f"{ours}down", f"D F -> {stacked} F D"),
    )


def _attention_and_norms(hub: str, ours: str, stacked: str = "layer") -> tuple[Row, ...]:
    """The rows every decoder layer has."""
    return (
        Row(f"{hub}input_layernorm.weight", f"{ours}input_norm/scale", f"D -> {stacked} D"),
        Row(f"{hub}post_attention_layernorm.weight", f"{ours}post_attention_norm/scale", f"D -> {stacked} D"),
        Row(f"{hub}self_attn.q_proj.weight", f"{ours}attention/q_proj", f"(h d) D -> {stacked} D h d"),
        Row(f"{hub}self_attn.k_proj.weight", f"{ours}attention/k_proj", f"(h d) D -> {stacked} D h d"),
        Row(f"{hub}self_attn.v_proj.weight", f"{ours}attention/v_proj", f"(h d) D -> {stacked} D h d"),
        Row(f"{hub}self_attn.o_proj.weight", f"{ours}attention/o_proj", f"D (h d) -> {stacked} h d D"),
    )


DECODER: tuple[Row, ...] = (
    Row("model.embed_tokens.weight", "embed/embedding", "V D -> V D"),
    Row("model.norm.weight", "norm/scale", "D -> D"),
    Row("lm_head.weight", "lm_head/kernel", "V D -> V D"),
    *_attention_and_norms(_HUB, _OURS),
    *_gated_mlp(f"{_HUB}mlp.", f"{_OURS}mlp/"),
    *_gated_mlp(f"{_HUB}mlp.experts.{{expert}}.", f"{_OURS}moe/experts/", "layer expert"),
    *_gated_mlp(f"{_HUB}mlp.shared_experts.", f"{_OURS}moe/shared_experts/"),
)

_BIAS = f"{_HUB}mlp.moe_statics.e_score_correction_bias"

# As Baidu publishes them; transformers knows no such blocks and passes over every tensor with `mtp` in its name.
MTP: tuple[Row, ...] = (
    Row("model.mtp_emb_norm.{mtp}.weight", "mtp/block/embedding_norm/scale", "D -> mtp D"),
    Row("model.mtp_hidden_norm.{mtp}.weight", "mtp/block/hidden_norm/scale", "D -> mtp D"),
    Row("model.mtp_linear_proj.{mtp}.weight", "mtp/block/projection/kernel", "O I -> mtp I O"),
    *_attention_and_norms("model.mtp_block.{mtp}.", "mtp/block/layer/", "mtp"),
    *_gated_mlp("model.mtp_block.{mtp}.mlp.", "mtp/block/layer/mlp/", "mtp"),
)

TEXT: tuple[Row, ...] = (
    *DECODER,
    *MTP,
    Row(f"{_HUB}mlp.gate.weight", f"{_OURS}moe/router/gate", "E D -> layer E D", float32=True),
    Row(_BIAS, f"{_OURS}moe/router/bias", "0 E -> layer E", float32=True),
)


_BLOCK = "model.vision_model.blocks.{block}."
_OUR_BLOCK = "vision_tower/blocks/"


def _linear(hub: str, ours: str, index: str = "") -> tuple[Row, ...]:
    """The rows of a linear layer, stored [outputs, inputs] there and [inputs, outputs] here, and of its bias."""
    return (
        Row(f"{hub}.weight", f"{ours}/kernel", f"O I -> {index} I O"),
        Row(f"{hub}.bias", f"{ours}/bias", f"O -> {index} O"),
    )


def _layer_norm(hub: str, ours: str, index: str = "") -> tuple[Row, ...]:
    axes = f"D -> {index} D"
    return Row(f"{hub}.weight", f"{ours}/scale", axes), Row(f"{hub}.bias", f"{ours}/bias", axes)


def _projection(hub: str, ours: str) -> tuple[Row, ...]:
    """A projection of the resampler, whose parts the files number; 1 is the activation."""
    return (*_linear(f"{hub}.0", f"{ours}/fc1"), *_linear(f"{hub}.2", f"{ours}/fc2"), *_layer_norm(f"{hub}.3", f"{ours}/norm"))


VISION: tuple[Row, ...] = (
    Row("model.vision_model.patch_embed.proj.weight", "vision_tower/patch_embed/kernel", "O I -> I O"),
    *_layer_norm(f"{_BLOCK}norm1", f"{_OUR_BLOCK}norm1", "block"),
    *_linear(f"{_BLOCK}attn.qkv", f"{_OUR_BLOCK}qkv", "block"),
    *_linear(f"{_BLOCK}attn.proj", f"{_OUR_BLOCK}proj", "block"),
    *_layer_norm(f"{_BLOCK}norm2", f"{_OUR_BLOCK}norm2", "block"),
    *_linear(f"{_BLOCK}mlp.fc1", f"{_OUR_BLOCK}fc1", "block"),
    *_linear(f"{_BLOCK}mlp.fc2", f"{_OUR_BLOCK}fc2", "block"),
    *_layer_norm("model.vision_model.ln", "vision_tower/norm"),
    *_projection("model.resampler_model.spatial_linear", "resampler/spatial"),
    *_projection("model.resampler_model.temporal_linear", "resampler/temporal"),
    *_linear("model.resampler_model.mlp", "resampler/mlp"),
    Row("model.resampler_model.after_norm.weight", "resampler/norm/scale", "D -> D"),
)

# The gates are stored turned here, unlike those of text models; both modalities' biases share one tensor.
VISION_LANGUAGE: tuple[Row, ...] = (
    *DECODER,
    *_gated_mlp(f"{_HUB}mlp.experts.{{vision_expert}}.", f"{_OURS}moe/vision_experts/", "layer vision_expert"),
    Row(f"{_HUB}mlp.gate.weight", f"{_OURS}moe/router/gate", "D E -> layer E D", float32=True),
    Row(f"{_HUB}mlp.gate.weight_1", f"{_OURS}moe/vision_router/gate", "D E -> layer E D", float32=True),
    Row(_BIAS, f"{_OURS}moe/router/bias", "0 E -> layer E", float32=True),
    Row(_BIAS, f"{_OURS}moe/vision_router/bias", "1 E -> layer E", float32=True),
    *VISION,
)

# Baidu's own files keep the vision tower at the root.
ALSO_STORED_AS: Mapping[str, str] = {"vision_model.": "model.vision_model."}


def table_of(config: ModelConfig) -> tuple[Row, ...]:
    """The rows for a model of this shape."""
    return TEXT if config.vision is None else VISION_LANGUAGE
