"""A model's shape from a Hugging Face `config.json`, in the spellings of old and new files.

What the weights say wins over what the file says, because published files are known to be wrong or silent about two things:

- shared experts: the class default is 2, yet the 300B checkpoints have none and may lack the field;
- the tied head: a converted vision-language file may say "tied" beside an untied `lm_head.weight`.

So a caller that can see the checkpoint passes the names of its tensors (best: a mapping from name to shape). Without them a
missing `moe_num_shared_experts` means 0, and the flag of the file is believed.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from etils import epath

from ernie_jax.config.hf_fields import HfFields
from ernie_jax.config.hf_write import config_to_hf
from ernie_jax.config.model import ModelConfig, MoEConfig, VisionConfig
from ernie_jax.config.nearest import did_you_mean

__all__ = ["MODEL_TYPES", "TensorNames", "config_from_hf", "config_to_hf"]

TensorNames = Iterable[str] | Mapping[str, Sequence[int]]

logger = logging.getLogger(__name__)

_ROPE_THETA = 500000.0
_HEAD_DIM = 128  # class default of the dense model; the other classes have none and divide
_TEMPORAL_FREQUENCIES = 20


def config_from_hf(source: str | os.PathLike[str] | Mapping[str, Any], *, tensor_names: TensorNames | None = None) -> ModelConfig:
    """The shape of a published or exported model.

    Args:
      source: a folder with a `config.json`, the file itself (any path `etils.epath` reads), or its content.
      tensor_names: names of the checkpoint's tensors, or a mapping from name to shape; they decide on shared experts and on
        the tied head (see the module).

    Raises:
      ValueError: an unknown model_type, a missing or mistyped key, a feature that is not supported (bias, scaled rope), or a
        file that contradicts the tensors; the file and the key are named.
    """
    values, where = _load(source)
    model_type = str(values.get("model_type"))
    if model_type not in MODEL_TYPES:
        guess = did_you_mean(model_type, MODEL_TYPES)
        raise ValueError(f"{where}: model_type={model_type!r}{guess}; supported are {', '.join(MODEL_TYPES)}")
    evidence = None if tensor_names is None else _Evidence(tensor_names)
    try:
        return MODEL_TYPES[model_type](HfFields(values, where), evidence)
    except ValueError as error:
        # The shape's own checks do not know where the numbers came from.
        if where in str(error):
            raise
        raise ValueError(f"{where}: {error}") from error


def _load(source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    if isinstance(source, Mapping):
        return source, "config.json"
    path = epath.Path(source)
    path = path if path.suffix == ".json" else path / "config.json"
    if not path.exists():
        raise ValueError(f"no Hugging Face configuration at {path}; expected a folder with a config.json")
    try:
        values = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return values, str(path)


class _Evidence:
    """What the tensors of a checkpoint say about its shape."""

    def __init__(self, names: TensorNames) -> None:
        shapes = names if isinstance(names, Mapping) else dict.fromkeys(names)
        self.has_head = any(name.split(".")[-2:] == ["lm_head", "weight"] for name in shapes)
        shared = {name: shape for name, shape in shapes.items() if ".shared_experts." in name}
        self.has_shared = bool(shared)
        # [width, D] for gate and up, [D, width] for down.
        widths = (shape[1 if ".down_proj." in name else 0] for name, shape in shared.items() if shape is not None)
        self.shared_width: int | None = next(widths, None)


def _tied(fields: Sequence[HfFields], evidence: _Evidence | None) -> bool:
    where = fields[0].where
    found = [f.read(bool, "tie_word_embeddings") for f in fields if f.raw("tie_word_embeddings") is not None]
    if evidence is not None:
        if not evidence.has_head and False in found:
            raise ValueError(
                f"{where}: tie_word_embeddings is false, but the checkpoint has no lm_head.weight; either the file of the head is "
                "missing or the flag should be true"
            )
        if evidence.has_head and True in found:
            logger.warning("%s: tie_word_embeddings is true beside a stored lm_head.weight; the stored head is used", where)
        return not evidence.has_head
    if len(set(found)) > 1:
        raise ValueError(
            f"{where}: tie_word_embeddings is {found[0]} at the top and {found[1]} in text_config; pass `tensor_names`, "
            "so that the presence of lm_head.weight decides"
        )
    return found[0] if found else True


def _head_dim(fields: HfFields, hidden: int, heads: int, *, default: int | None) -> int:
    if fields.raw("head_dim") is not None:
        return fields.read(int, "head_dim")
    if default is not None and "head_dim" not in fields.values:
        return default
    if hidden % heads:
        raise ValueError(f"{fields.where} lacks head_dim, and num_attention_heads={heads} does not divide hidden_size={hidden}")
    return hidden // heads


def _rope(fields: HfFields, *, kinds: Sequence[str] = ("default",), theta: float = _ROPE_THETA) -> tuple[float, HfFields | None]:
    """Rope base and the object that may hold `mrope_section`."""
    nested = fields.section("rope_parameters", "rope_scaling")
    if nested is None:
        return fields.read(float, "rope_theta", default=theta), None
    kind = nested.read(str, "rope_type", "type", default="default")
    if kind not in kinds:
        raise ValueError(f"{nested.where}: rope_type={kind!r} is not supported; expected {' or '.join(kinds)}")
    top = fields.read(float, "rope_theta", default=theta)
    return nested.read(float, "rope_theta", default=top), nested


def _text(fields: HfFields, *, head_dim: int | None = None) -> dict[str, Any]:
    """The fields every decoder has, but for the tied head."""
    hidden, heads = fields.read(int, "hidden_size"), fields.read(int, "num_attention_heads")
    optional: dict[str, Any] = {}
    for name in ("max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id", "num_nextn_predict_layers"):
        if fields.raw(name) is not None:
            optional[name] = fields.read(int, name)
    for name in ("rms_norm_eps", "initializer_range"):
        if fields.raw(name) is not None:
            optional[name] = fields.read(float, name)
    return optional | {
        "vocab_size": fields.read(int, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.read(int, "intermediate_size"),
        "num_hidden_layers": fields.read(int, "num_hidden_layers"),
        "num_attention_heads": heads,
        # Absent or null means no grouping, as in the classes.
        "num_key_value_heads": fields.read(int, "num_key_value_heads", default=heads),
        "head_dim": _head_dim(fields, hidden, heads, default=head_dim),
        "hidden_act": fields.read(str, "hidden_act", default="silu"),
        "rope_theta": _rope(fields)[0],
    }


def _layer_range(fields: HfFields, layers: int) -> dict[str, int]:
    """Which layers are MoE, as start, end and interval: from the explicit list of kinds or from the three fields."""
    kinds = fields.raw("mlp_layer_types")
    if kinds is None:
        starts = fields.integers("moe_layer_start_index", default=1)
        ends = fields.integers("moe_layer_end_index", default=-1)
        interval = fields.read(int, "moe_layer_interval", default=1)
        return {"layer_start": min(starts), "layer_end": _last(max(ends, key=_unbounded), layers), "layer_interval": interval}
    if not isinstance(kinds, list | tuple) or len(kinds) != layers or not set(kinds) <= {"dense", "sparse"}:
        raise ValueError(
            f"{fields.where}: mlp_layer_types={kinds!r}; expected {layers} entries (num_hidden_layers), 'dense' or 'sparse'"
        )
    sparse = [index for index, kind in enumerate(kinds) if kind == "sparse"]
    if not sparse:
        raise ValueError(f"{fields.where}: mlp_layer_types has no 'sparse' layer; a model with experts needs one")
    interval = sparse[1] - sparse[0] if len(sparse) > 1 else 1
    rule = [i for i in range(sparse[0], sparse[-1] + 1) if (i + 1) % interval == 0]
    if sparse != rule:
        raise ValueError(
            f"{fields.where}: mlp_layer_types has sparse layers {sparse}; supported are all layers l of a range with "
            "(l + 1) divisible by an interval"
        )
    return {"layer_start": sparse[0], "layer_end": _last(sparse[-1], layers), "layer_interval": interval}


def _unbounded(end: int) -> float:
    return float("inf") if end == -1 else end


def _last(end: int, layers: int) -> int:
    """-1 for "to the last layer", however it was spelled (-1, the last index, or beyond), so that equal shapes compare equal."""
    return -1 if _unbounded(end) >= layers - 1 else end


def _moe(fields: HfFields, layers: int, evidence: _Evidence | None, *, modalities: int = 1) -> MoEConfig:
    experts = set(fields.integers("moe_num_experts", "num_experts"))
    chosen = set(fields.integers("moe_k", "num_experts_per_tok"))
    widths = fields.integers("moe_intermediate_size")
    if len(experts) > 1 or len(chosen) > 1:
        raise ValueError(
            f"{fields.where}: moe_num_experts={sorted(experts)}, moe_k={sorted(chosen)}; text and vision need the same numbers"
        )
    if len(widths) != modalities:
        raise ValueError(f"{fields.where}: moe_intermediate_size={list(widths)}; expected {modalities} width(s), one a modality")
    return MoEConfig(
        num_experts=experts.pop(),
        num_experts_per_tok=chosen.pop(),
        intermediate_size=widths[0],
        num_shared_experts=_shared_experts(fields, widths[0], evidence),
        norm_min=fields.read(float, "moe_norm_min", default=1e-12),
        vision_intermediate_size=widths[1] if modalities == 2 else None,
        **_layer_range(fields, layers),
    )


def _shared_experts(fields: HfFields, expert_width: int, evidence: _Evidence | None) -> int:
    name = "moe_num_shared_experts"
    stated = fields.read(int, name, default=0)
    if evidence is None:
        return stated
    if not evidence.has_shared:
        return 0
    width = evidence.shared_width
    if width is None:
        if stated == 0:
            raise ValueError(
                f"{fields.where}: {name} is absent or 0, but the checkpoint has shared_experts tensors; pass their shapes "
                f"(`tensor_names` as a mapping from name to shape) or set {name}"
            )
        return stated
    if width % expert_width:
        raise ValueError(
            f"{fields.where}: shared_experts tensors of width {width} are not a whole number of experts of width {expert_width} "
            "(moe_intermediate_size)"
        )
    return width // expert_width


def _dense_model(fields: HfFields, evidence: _Evidence | None) -> ModelConfig:
    model = ModelConfig(**_text(fields, head_dim=_HEAD_DIM), tie_word_embeddings=_tied([fields], evidence))
    fields.warn_unread()
    return model


def _moe_model(fields: HfFields, evidence: _Evidence | None) -> ModelConfig:
    text = _text(fields)
    moe = _moe(fields, text["num_hidden_layers"], evidence)
    model = ModelConfig(**text, moe=moe, tie_word_embeddings=_tied([fields], evidence))
    fields.warn_unread()
    return model


def _vision_language_model(fields: HfFields, evidence: _Evidence | None) -> ModelConfig:
    # The original files keep the decoder's fields at the top, the converted ones in `text_config`.
    decoder = fields.section("text_config") or fields
    text = _text(decoder)
    moe = _moe(decoder, text["num_hidden_layers"], evidence, modalities=2)
    tied = _tied([fields] if decoder is fields else [fields, decoder], evidence)
    model = ModelConfig(
        **text, moe=moe, tie_word_embeddings=tied, mrope_section=_mrope_section(decoder, text["head_dim"]), vision=_vision(fields)
    )
    fields.warn_unread()
    if decoder is not fields:
        decoder.warn_unread()
    return model


def _mrope_section(fields: HfFields, head_dim: int) -> tuple[int, int, int]:
    nested = _rope(fields)[1]
    if nested is not None and nested.raw("mrope_section") is not None:
        section = nested.integers("mrope_section")
        if len(section) != 3:
            raise ValueError(f"{nested.where}: mrope_section={list(section)}; expected three numbers (height, width, time)")
        return section[0], section[1], section[2]
    if fields.raw("freq_allocation") is None:
        return (22, 22, _TEMPORAL_FREQUENCIES)
    temporal = fields.read(int, "freq_allocation")
    side = (head_dim // 2 - temporal) // 2
    return (side, side, temporal)


def _vision(fields: HfFields) -> VisionConfig:
    tower = fields.section("vision_config")
    if tower is None:
        raise ValueError(f"{fields.where} lacks vision_config")
    usual = VisionConfig()
    hidden = tower.read(int, "hidden_size", "embed_dim", default=usual.hidden_size)
    merges: dict[str, Any] = {}
    for name, old in (("spatial_merge_size", "spatial_conv_size"), ("temporal_merge_size", "temporal_conv_size")):
        # The original files say it beside the decoder's fields.
        outer = fields.read(int, name, old, default=getattr(usual, name))
        merges[name] = tower.read(int, name, old, default=outer)
    tokens: dict[str, Any] = {
        "image_token_id": fields.read(int, "image_token_id", "im_patch_id", default=usual.image_token_id),
    }
    for name in ("image_start_token_id", "image_end_token_id", "video_token_id", "video_start_token_id", "video_end_token_id"):
        tokens[name] = fields.read(int, name, default=getattr(usual, name))
    vision = VisionConfig(
        depth=tower.read(int, "depth", "num_hidden_layers", default=usual.depth),
        hidden_size=hidden,
        num_heads=tower.read(int, "num_heads", "num_attention_heads", default=usual.num_heads),
        intermediate_size=tower.read(int, "intermediate_size", default=int(hidden * tower.read(float, "mlp_ratio", default=4.0))),
        hidden_act=tower.read(str, "hidden_act", default=usual.hidden_act),
        patch_size=tower.read(int, "patch_size", default=usual.patch_size),
        in_channels=tower.read(int, "in_channels", "in_chans", default=usual.in_channels),
        rms_norm_eps=tower.read(float, "rms_norm_eps", default=usual.rms_norm_eps),
        rope_theta=_rope(tower, kinds=("axial", "default"), theta=usual.rope_theta)[0],
        initializer_range=tower.read(float, "initializer_range", default=usual.initializer_range),
        **merges,
        **tokens,
    )
    tower.raw("attn_sep")
    tower.warn_unread()
    return vision


MODEL_TYPES: Mapping[str, Callable[[HfFields, _Evidence | None], ModelConfig]] = {
    "ernie4_5": _dense_model,
    "ernie4_5_moe": _moe_model,
    "ernie4_5_vl_moe": _vision_language_model,
    "ernie4_5_moe_vl": _vision_language_model,
}
