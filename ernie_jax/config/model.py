"""The shape of a model: what decides parameters and mathematics, and nothing about how it is run."""

from __future__ import annotations

from dataclasses import dataclass

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "quick_gelu", "relu")


def _positive(owner: str, **fields: int) -> None:
    """Raise ValueError naming every field that is not a positive integer."""
    bad = {name: value for name, value in fields.items() if isinstance(value, bool) or not isinstance(value, int) or value < 1}
    if bad:
        raise ValueError(f"{owner}: expected positive integers, got {bad}")


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The mixture-of-experts part of a decoder (architecture: router, experts, shared experts).

    Attributes:
      num_experts: routed experts E of each modality.
      num_experts_per_tok: experts K chosen for each token.
      intermediate_size: width F of one routed (text) expert.
      num_shared_experts: S; the shared MLP has width S * intermediate_size and sees every token.
      layer_start, layer_end, layer_interval: layer l is MoE when start <= l <= end and (l + 1) % interval == 0;
        an end of -1 means the last layer.
      norm_min: lower bound of the sum that normalises the K mixing weights.
      vision_intermediate_size: width of one vision expert; None for a text-only model.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    num_shared_experts: int = 0
    layer_start: int = 0
    layer_end: int = -1
    layer_interval: int = 1
    norm_min: float = 1e-12
    vision_intermediate_size: int | None = None

    def __post_init__(self) -> None:
        _positive(
            "MoEConfig",
            num_experts=self.num_experts,
            num_experts_per_tok=self.num_experts_per_tok,
            intermediate_size=self.intermediate_size,
            layer_interval=self.layer_interval,
        )
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"MoEConfig: num_experts_per_tok={self.num_experts_per_tok} is more than num_experts={self.num_experts}; "
                "a token cannot choose one expert twice"
            )
        if self.num_shared_experts < 0:
            raise ValueError(f"MoEConfig: num_shared_experts={self.num_shared_experts}; expected 0 (none) or more")
        if self.layer_start < 0 or self.layer_end < -1:
            raise ValueError(
                f"MoEConfig: layer_start={self.layer_start}, layer_end={self.layer_end}; expected indices (end -1: the last)"
            )

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the shared MLP, 0 without shared experts."""
        return self.num_shared_experts * self.intermediate_size


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The vision tower and the image tokens of a vision-language model.

    `position_advance` is how text positions go on behind an image or video: `reference` by its larger side, as `transformers`
    does; `original` to one past its largest position in any direction, as the models were trained. They differ only for videos
    of more frame pairs than either side has tokens.
    """

    depth: int = 32
    hidden_size: int = 1280
    num_heads: int = 16
    intermediate_size: int = 5120
    hidden_act: str = "quick_gelu"
    patch_size: int = 14
    in_channels: int = 3
    spatial_merge_size: int = 2
    temporal_merge_size: int = 2
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    initializer_range: float = 0.02
    image_token_id: int = 100295
    image_start_token_id: int = 101304
    image_end_token_id: int = 101305
    video_token_id: int = 103367
    video_start_token_id: int = 101306
    video_end_token_id: int = 101307
    position_advance: str = "reference"

    def __post_init__(self) -> None:
        _positive(
            "VisionConfig",
            depth=self.depth,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            intermediate_size=self.intermediate_size,
            patch_size=self.patch_size,
            in_channels=self.in_channels,
            spatial_merge_size=self.spatial_merge_size,
        )
        if self.temporal_merge_size != 2:
            raise ValueError(
                f"VisionConfig: temporal_merge_size={self.temporal_merge_size}; expected 2, the resampler pairs frames"
            )
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 4:
            raise ValueError(
                f"VisionConfig: hidden_size={self.hidden_size} over num_heads={self.num_heads} must give a head width that is a "
                "multiple of 4 (two axes of rotated pairs)"
            )
        if self.position_advance not in ("reference", "original"):
            raise ValueError(f"VisionConfig: position_advance={self.position_advance!r}; expected 'reference' or 'original'")
        if self.hidden_act not in ACTIVATIONS:
            raise ValueError(f"VisionConfig: hidden_act={self.hidden_act!r}; expected one of {ACTIVATIONS}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A whole ERNIE 4.5 model. `moe` is None for a dense model, `vision` is None for a text model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool
    hidden_act: str = "silu"
    rope_theta: float = 500000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 131072
    initializer_range: float = 0.02
    pad_token_id: int = 0
    bos_token_id: int = 1
    eos_token_id: int = 2
    num_nextn_predict_layers: int = 0
    mrope_section: tuple[int, int, int] | None = None
    moe: MoEConfig | None = None
    vision: VisionConfig | None = None

    def __post_init__(self) -> None:
        _positive(
            "ModelConfig",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_position_embeddings,
        )
        if self.num_nextn_predict_layers < 0:
            raise ValueError(
                f"ModelConfig: num_nextn_predict_layers={self.num_nextn_predict_layers}; expected 0 (none) or more blocks"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"ModelConfig: num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"ModelConfig: head_dim={self.head_dim}; rotary embeddings turn pairs, so it must be even")
        if self.hidden_act not in ACTIVATIONS:
            raise ValueError(f"ModelConfig: hidden_act={self.hidden_act!r}; expected one of {ACTIVATIONS}")
        if self.mrope_section is not None:
            h, w, t = self.mrope_section
            if h != w or h + w + t != self.head_dim // 2:
                raise ValueError(
                    f"ModelConfig: mrope_section={self.mrope_section} (height, width, time) must have equal first two entries and "
                    f"sum to head_dim / 2 = {self.head_dim // 2}"
                )
        if self.vision is not None and self.moe is not None and self.moe.vision_intermediate_size is None:
            raise ValueError("ModelConfig: a vision model with experts needs moe.vision_intermediate_size")
        if self.moe is not None and max(self.moe.layer_start, self.moe.layer_end) >= self.num_hidden_layers:
            raise ValueError(
                f"ModelConfig: moe.layer_start={self.moe.layer_start}, moe.layer_end={self.moe.layer_end} must be below "
                f"num_hidden_layers={self.num_hidden_layers}"
            )

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """`"dense"` or `"moe"` for each layer, by its global index."""
        moe, n = self.moe, self.num_hidden_layers
        if moe is None:
            return ("dense",) * n
        end = n - 1 if moe.layer_end == -1 else moe.layer_end
        return tuple("moe" if moe.layer_start <= i <= end and (i + 1) % moe.layer_interval == 0 else "dense" for i in range(n))

    @property
    def num_moe_layers(self) -> int:
        """How many layers hold experts."""
        return self.layer_kinds.count("moe")
