"""`config.json` of Hugging Face checkpoints, read in the old and the new spelling and written in the new one.

Fields the mathematics does not use (dtype, use_cache, the transformers version, capacity lists of the Paddle recipes ...) are
passed over. Where a json is silent or wrong about shared experts or tied embeddings, the weights decide: pass their names.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ernie_jax.config.model import ModelConfig, MoEConfig, VisionConfig

_DENSE, _MOE = "ernie4_5", "ernie4_5_moe"
_VISION = ("ernie4_5_vl_moe", "ernie4_5_moe_vl")
MODEL_TYPES = (_DENSE, _MOE, *_VISION)
# Class default of the dense family, where head_dim is not hidden_size / heads.
_DENSE_HEAD_DIM = 128
_MROPE_SECTION = (22, 22, 20)


class _Reader:
    """Reads fields of one json object under any of their spellings, and names the file in errors."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def get(self, *names: str, default: Any = None) -> Any:
        for name in names:
            if self.values.get(name) is not None:
                return self.values[name]
        return default

    def need(self, *names: str) -> Any:
        value = self.get(*names)
        if value is None:
            raise ValueError(f"{self.where}: the field {' or '.join(names)} is missing")
        return value


def read_json(folder: str | Path) -> dict[str, Any]:
    """The `config.json` of a checkpoint folder.

    Raises:
      ValueError: no folder, no file, or not a json object.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist; expected a folder with a Hugging Face checkpoint")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}; expected an object")
    return values


def config_from_hf(source: str | Path | Mapping[str, Any], *, tensor_names: Collection[str] | None = None) -> ModelConfig:
    """The model shape a Hugging Face `config.json` describes.

    Args:
      source: a checkpoint folder, or the parsed json.
      tensor_names: names of the checkpoint's tensors, which then decide whether there are shared experts and whether the
        output head is tied. Without them a json without `moe_num_shared_experts` means none, as in the 300B files (the
        reference loader would assume two and fail).

    Raises:
      ValueError: an unknown model type, a missing field, rope scaling, biases, or flags that contradict the tensors.
    """
    where = "config.json" if isinstance(source, Mapping) else str(Path(source) / "config.json")
    values = source if isinstance(source, Mapping) else read_json(source)
    model_type = values.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ValueError(f"{where}: model_type={model_type!r}; expected one of {', '.join(MODEL_TYPES)}")
    vision_language = model_type in _VISION
    text = _Reader(values.get("text_config", values) if vision_language else values, where)
    if text.get("use_bias", default=False):
        raise ValueError(f"{where}: use_bias=true is not supported; no published ERNIE 4.5 model has biases in its projections")
    hidden, heads = text.need("hidden_size"), text.need("num_attention_heads")
    theta, section = _rope(text, hidden, heads, vision_language)
    head_dim = text.get("head_dim", default=_DENSE_HEAD_DIM if model_type == _DENSE else hidden // heads)
    layers = text.need("num_hidden_layers")
    tied = _tied(text, _Reader(values, where), tensor_names)
    return ModelConfig(
        vocab_size=text.need("vocab_size"),
        hidden_size=hidden,
        intermediate_size=text.need("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=text.get("num_key_value_heads", default=heads),
        head_dim=head_dim,
        tie_word_embeddings=tied,
        hidden_act=text.get("hidden_act", default="silu"),
        rope_theta=float(theta),
        rms_norm_eps=text.get("rms_norm_eps", default=1e-5),
        max_position_embeddings=text.get("max_position_embeddings", default=131072),
        initializer_range=text.get("initializer_range", default=0.02),
        pad_token_id=text.get("pad_token_id", default=0),
        bos_token_id=text.get("bos_token_id", default=1),
        eos_token_id=text.get("eos_token_id", default=2),
        num_nextn_predict_layers=text.get("num_nextn_predict_layers", default=0),
        mrope_section=section,
        moe=None if model_type == _DENSE else _moe(text, layers, vision_language, tensor_names),
        vision=_vision(values, where) if vision_language else None,
    )


def _rope(text: _Reader, hidden: int, heads: int, vision_language: bool) -> tuple[float, tuple[int, int, int] | None]:
    parameters = text.get("rope_parameters", "rope_scaling", default={})
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    # Older vision-language files name their 3D rotation instead of a scaling.
    if kind not in ("default", "mrope", "ernie_3d"):
        raise ValueError(f"{text.where}: rope_type={kind!r}; only unscaled rotary positions ('default') exist in ERNIE 4.5")
    theta = parameters.get("rope_theta", text.get("rope_theta", default=500000.0))
    if not vision_language:
        return theta, None
    section = parameters.get("mrope_section", text.get("mrope_section", default=_MROPE_SECTION))
    return theta, tuple(section)  # type: ignore[return-value]


def _tied(text: _Reader, top: _Reader, tensor_names: Collection[str] | None) -> bool:
    flag = text.get("tie_word_embeddings", default=top.get("tie_word_embeddings"))
    if tensor_names is None:
        return True if flag is None else bool(flag)
    has_head = "lm_head.weight" in tensor_names
    if flag is False and not has_head:
        raise ValueError(
            f"{text.where} says tie_word_embeddings=false, but the checkpoint has no lm_head.weight; add the head, or set the flag to true"
        )
    # A head beside a flag that says "tied" is compared with the embedding by the importer, which knows the values.
    return bool(flag) if flag is not None else not has_head


def _moe(text: _Reader, layers: int, vision_language: bool, tensor_names: Collection[str] | None) -> MoEConfig:
    def scalar(value: Any) -> int:
        return int(value[0]) if isinstance(value, list | tuple) else int(value)

    experts = text.need("moe_num_experts", "num_experts")
    if isinstance(experts, list | tuple) and len(set(experts)) > 1:
        raise ValueError(f"{text.where}: moe_num_experts={list(experts)}; text and vision must have the same number of experts")
    widths = text.need("moe_intermediate_size")
    widths = list(widths) if isinstance(widths, list | tuple) else [widths]
    shared = text.get("moe_num_shared_experts")
    if tensor_names is not None:
        present = any(".shared_experts." in name for name in tensor_names)
        if shared and not present:
            raise ValueError(
                f"{text.where} says moe_num_shared_experts={shared}, but the checkpoint has no shared_experts tensors; "
                "set the field to 0 if the model has none"
            )
        if present and not shared:
            raise ValueError(
                f"{text.where} does not say how many shared experts there are, but the checkpoint has shared_experts tensors; "
                "set moe_num_shared_experts (the width of shared_experts.gate_proj over moe_intermediate_size)"
            )
    start, end = text.get("moe_layer_start_index", default=0), text.get("moe_layer_end_index", default=-1)
    interval = text.get("moe_layer_interval", default=1)
    kinds = text.get("mlp_layer_types")
    if kinds is not None:
        sparse = [i for i, kind in enumerate(kinds) if kind == "sparse"]
        if len(kinds) != layers or not sparse or sparse != list(range(sparse[0], sparse[-1] + 1)):
            raise ValueError(
                f"{text.where}: mlp_layer_types={kinds}; expected {layers} entries, 'dense' or 'sparse', with the sparse ones in one run"
            )
        start, end, interval = sparse[0], sparse[-1], 1
    elif vision_language and text.get("moe_layer_start_index") is None:
        start = 1
    start = min(start) if isinstance(start, list | tuple) else start
    end = max(end) if isinstance(end, list | tuple) else end
    return MoEConfig(
        num_experts=scalar(experts),
        num_experts_per_tok=scalar(text.need("moe_k", "num_experts_per_tok")),
        intermediate_size=int(widths[0]),
        num_shared_experts=int(shared or 0),
        layer_start=start,
        layer_end=layers - 1 if end == -1 else min(end, layers - 1),
        layer_interval=interval,
        norm_min=text.get("moe_norm_min", default=1e-12),
        vision_intermediate_size=int(widths[1] if len(widths) > 1 else widths[0]) if vision_language else None,
    )


def _vision(values: Mapping[str, Any], where: str) -> VisionConfig:
    default = VisionConfig()
    tower, top = _Reader(values.get("vision_config", {}), f"{where}, vision_config"), _Reader(values, where)
    hidden = tower.get("hidden_size", "embed_dim", default=default.hidden_size)
    return VisionConfig(
        depth=tower.get("depth", "num_hidden_layers", default=default.depth),
        hidden_size=hidden,
        num_heads=tower.get("num_heads", "num_attention_heads", default=default.num_heads),
        intermediate_size=tower.get("intermediate_size", default=int(hidden * tower.get("mlp_ratio", default=4))),
        hidden_act=tower.get("hidden_act", default=default.hidden_act),
        patch_size=tower.get("patch_size", default=default.patch_size),
        in_channels=tower.get("in_channels", "in_chans", default=default.in_channels),
        spatial_merge_size=tower.get("spatial_merge_size", default=top.get("spatial_conv_size", default=default.spatial_merge_size)),
        temporal_merge_size=tower.get("temporal_merge_size", default=top.get("temporal_conv_size", default=default.temporal_merge_size)),
        rms_norm_eps=tower.get("rms_norm_eps", default=default.rms_norm_eps),
        image_token_id=top.get("image_token_id", "im_patch_id", default=default.image_token_id),
        image_start_token_id=top.get("image_start_token_id", default=default.image_start_token_id),
        image_end_token_id=top.get("image_end_token_id", default=default.image_end_token_id),
        video_token_id=top.get("video_token_id", default=default.video_token_id),
        video_start_token_id=top.get("video_start_token_id", default=default.video_start_token_id),
        video_end_token_id=top.get("video_end_token_id", default=default.video_end_token_id),
    )


def config_to_hf(config: ModelConfig, *, dtype: str = "float32") -> dict[str, Any]:
    """The `config.json` of a model, in the spelling of transformers 5, so that it loads there."""
    text: dict[str, Any] = {
        "bos_token_id": config.bos_token_id,
        "dtype": dtype,
        "eos_token_id": config.eos_token_id,
        "hidden_act": config.hidden_act,
        "hidden_size": config.hidden_size,
        "initializer_range": config.initializer_range,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "pad_token_id": config.pad_token_id,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": config.tie_word_embeddings,
        "use_bias": False,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }
    # The MoE and vision-language classes derive the head width unless the json carries it.
    if config.moe is None or config.head_dim * config.num_attention_heads != config.hidden_size:
        text["head_dim"] = config.head_dim
    if config.num_nextn_predict_layers:
        text["num_nextn_predict_layers"] = config.num_nextn_predict_layers
    moe = config.moe
    if moe is None:
        return {"architectures": ["Ernie4_5ForCausalLM"], "model_type": _DENSE, **text}
    vision_widths = [] if moe.vision_intermediate_size is None else [moe.vision_intermediate_size]
    text |= {
        "moe_intermediate_size": [moe.intermediate_size, *vision_widths] if vision_widths else moe.intermediate_size,
        "moe_k": moe.num_experts_per_tok,
        "moe_norm_min": moe.norm_min,
        "moe_num_experts": moe.num_experts,
        "moe_num_shared_experts": moe.num_shared_experts,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }
    if config.vision is None:
        text |= {
            "moe_layer_end_index": config.num_hidden_layers - 1 if moe.layer_end == -1 else moe.layer_end,
            "moe_layer_interval": moe.layer_interval,
            "moe_layer_start_index": moe.layer_start,
        }
        return {"architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": _MOE, **text}
    return _vision_to_hf(config, text, dtype)


def _vision_to_hf(config: ModelConfig, text: dict[str, Any], dtype: str) -> dict[str, Any]:
    vision = config.vision
    assert vision is not None
    section = list(config.mrope_section or _MROPE_SECTION)
    text["rope_parameters"] = {"mrope_section": section, "rope_theta": config.rope_theta, "rope_type": "default"}
    text["mlp_layer_types"] = ["sparse" if kind == "moe" else "dense" for kind in config.layer_kinds]
    tower = {
        "depth": vision.depth,
        "dtype": dtype,
        "hidden_act": vision.hidden_act,
        "hidden_size": vision.hidden_size,
        "in_channels": vision.in_channels,
        "initializer_range": config.initializer_range,
        "intermediate_size": vision.intermediate_size,
        "model_type": "ernie4_5_vl_moe_vision",
        "num_heads": vision.num_heads,
        "patch_size": vision.patch_size,
        "rms_norm_eps": vision.rms_norm_eps,
        "rope_parameters": {"rope_theta": vision.rope_theta, "rope_type": "axial"},
        "spatial_merge_size": vision.spatial_merge_size,
        "temporal_merge_size": vision.temporal_merge_size,
    }
    return {
        "architectures": ["Ernie4_5_VLMoeForConditionalGeneration"],
        "dtype": dtype,
        "image_end_token_id": vision.image_end_token_id,
        "image_start_token_id": vision.image_start_token_id,
        "image_token_id": vision.image_token_id,
        "model_type": "ernie4_5_vl_moe",
        "text_config": {"model_type": "ernie4_5_vl_moe_text", **text},
        "tie_word_embeddings": config.tie_word_embeddings,
        "video_end_token_id": vision.video_end_token_id,
        "video_start_token_id": vision.video_start_token_id,
        "video_token_id": vision.video_token_id,
        "vision_config": tower,
    }
