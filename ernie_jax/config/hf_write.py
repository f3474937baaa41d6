"""A model's shape as the `config.json` that transformers 5 writes and reads."""

from __future__ import annotations

from typing import Any

from ernie_jax.config.model import ModelConfig, MoEConfig, VisionConfig

# Training hints that the classes keep in the file; nothing here reads them back.
_ROUTER_HINTS = {"output_router_logits": False, "router_aux_loss_coef": 0.001}


def config_to_hf(config: ModelConfig, *, dtype: str = "bfloat16") -> dict[str, Any]:
    """The content of `config.json` for a model, equal to what transformers 5 writes but for `transformers_version`.

    Args:
      config: the shape.
      dtype: format of the weights beside the file.

    Raises:
      ValueError: a shape that no ERNIE 4.5 class describes (vision without experts, 3D positions or vision experts without
        vision).
    """
    moe, vision = config.moe, config.vision
    if vision is not None:
        if moe is None or moe.vision_intermediate_size is None or config.mrope_section is None:
            raise ValueError(
                "no Hugging Face class holds this vision model: expected moe with vision_intermediate_size, and mrope_section; got "
                f"moe={moe}, mrope_section={config.mrope_section}"
            )
        return _vision_language(config, moe, vision, dtype)
    if config.mrope_section is not None or (moe is not None and moe.vision_intermediate_size is not None):
        raise ValueError(
            f"no Hugging Face class holds a text model with mrope_section={config.mrope_section} or vision experts ({moe}); "
            "set both to None, or give the model a vision part"
        )
    if moe is None:
        kind = {"architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5", "head_dim": config.head_dim}
        return _decoder(config, dtype) | kind
    kind = {"architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe"}
    end = config.num_hidden_layers - 1 if moe.layer_end == -1 else moe.layer_end
    layers = {"moe_layer_start_index": moe.layer_start, "moe_layer_end_index": end, "moe_layer_interval": moe.layer_interval}
    return _decoder(config, dtype) | _experts(moe) | {"moe_intermediate_size": moe.intermediate_size} | layers | kind


def _decoder(config: ModelConfig, dtype: str) -> dict[str, Any]:
    same = (
        "bos_token_id",
        "eos_token_id",
        "hidden_act",
        "hidden_size",
        "initializer_range",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "pad_token_id",
        "rms_norm_eps",
        "tie_word_embeddings",
        "vocab_size",
    )
    values = {name: getattr(config, name) for name in same} | {"dtype": dtype, "use_bias": False, "use_cache": True}
    values["rope_parameters"] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    # The mixture-of-experts classes have no head_dim of their own but honour one in the file.
    if config.head_dim * config.num_attention_heads != config.hidden_size:
        values["head_dim"] = config.head_dim
    if config.num_nextn_predict_layers:
        values["num_nextn_predict_layers"] = config.num_nextn_predict_layers
    return values


def _experts(moe: MoEConfig) -> dict[str, Any]:
    return {
        "moe_k": moe.num_experts_per_tok,
        "moe_norm_min": moe.norm_min,
        "moe_num_experts": moe.num_experts,
        "moe_num_shared_experts": moe.num_shared_experts,
        **_ROUTER_HINTS,
    }


def _vision_language(config: ModelConfig, moe: MoEConfig, vision: VisionConfig, dtype: str) -> dict[str, Any]:
    text = _decoder(config, dtype) | _experts(moe)
    assert config.mrope_section is not None
    text["rope_parameters"] = text["rope_parameters"] | {"mrope_section": list(config.mrope_section)}
    text["mlp_layer_types"] = ["sparse" if kind == "moe" else "dense" for kind in config.layer_kinds]
    text["moe_intermediate_size"] = [moe.intermediate_size, moe.vision_intermediate_size]
    text["model_type"] = "ernie4_5_vl_moe_text"
    tokens = {
        f"{media}_{part}": getattr(vision, f"{media}_{part}")
        for media in ("image", "video")
        for part in ("token_id", "start_token_id", "end_token_id")
    }
    return {
        "architectures": ["Ernie4_5_VLMoeForConditionalGeneration"],
        "dtype": dtype,
        "model_type": "ernie4_5_vl_moe",
        "text_config": text,
        "tie_word_embeddings": config.tie_word_embeddings,
        "vision_config": _tower(vision, dtype),
        **tokens,
    }


def _tower(vision: VisionConfig, dtype: str) -> dict[str, Any]:
    same = (
        "depth",
        "hidden_act",
        "hidden_size",
        "in_channels",
        "initializer_range",
        "intermediate_size",
        "num_heads",
        "patch_size",
        "rms_norm_eps",
        "spatial_merge_size",
        "temporal_merge_size",
    )
    return {name: getattr(vision, name) for name in same} | {
        "dtype": dtype,
        "model_type": "ernie4_5_vl_moe_vision",
        "rope_parameters": {"rope_theta": vision.rope_theta, "rope_type": "axial"},
    }
