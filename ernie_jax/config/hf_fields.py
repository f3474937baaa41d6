"""One JSON object of a Hugging Face configuration, read by name and type, with the file in every error."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, TypeVar

from ernie_jax.config.nearest import did_you_mean

logger = logging.getLogger(__name__)

T = TypeVar("T", int, float, str, bool)

# Keys that say nothing about the shape or the mathematics: class names, generation and training settings, remote-code hints.
BOOKKEEPING = frozenset(
    """
    _attn_implementation _name_or_path architectures attention_dropout attention_probs_dropout_prob attn_implementation auto_map
    chunk_size_feed_forward cls_token_id dtype fuse_linear fuse_rms_norm fuse_rope fuse_softmax_mask fuse_swiglu
    hidden_dropout_prob id2label ignored_index is_encoder_decoder label2id loss_subbatch_seqlen max_sequence_length max_text_id
    modality_detach model_type moe_all_to_all_dropout moe_aux_loss_lambda moe_capacity moe_dense_experts_token_type_id
    moe_dropout_prob moe_gate moe_multimodal_dispatch_use_allgather moe_orthogonal_loss_lambda moe_use_aux_free moe_use_hard_gate
    moe_use_token_type_bias moe_z_loss_lambda multi_token_pred_lambda num_acc_steps output_attentions output_hidden_states
    output_router_logits pixel_hidden_size problem_type return_dict rope_3d router_aux_loss_coef sep_token_id tokenizer_class
    torch_dtype transformers_version use_cache use_flash_attention use_flash_attn use_fused_head_and_loss_fn use_mem_eff_attn
    use_recompute use_recompute_loss_fn use_rmsnorm use_sparse_flash_attn use_sparse_head_and_loss_fn use_temporal_conv
    use_var_len_flash_attn weight_share_add_bias
    """.split()  # noqa: SIM905 (a list of a name a line would be a page)
)

# Switches that change the mathematics in a way that is not implemented, and the one value of each that is.
ONLY_VALUE: Mapping[str, Any] = {
    "use_bias": False,
    "compression_ratio": 1.0,
    "mm_vocab_size": 0,
    "moe_group_experts": False,
    "scoring_func": "softmax",
    "sliding_window": None,
}


class HfFields:
    """A JSON object that knows where it came from and which of its keys were read.

    A key whose value is null counts as absent. Several names of one field are its spellings, the first the current one.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where
        self._read: set[str] = set()
        for key, only in ONLY_VALUE.items():
            if values.get(key) not in (None, only):
                raise ValueError(f"{where}: {key}={values[key]!r} is not supported; expected {only!r} or no such key")
        self._read.update(ONLY_VALUE)

    def raw(self, *names: str) -> Any:
        """The value under any of the spellings, None when there is none; two spellings that differ are an error."""
        self._read.update(names)
        found = {name: self.values[name] for name in names if self.values.get(name) is not None}
        values = list(found.values())
        if any(value != values[0] for value in values[1:]):
            raise ValueError(f"{self.where}: {found} are spellings of one field and must be equal")
        return values[0] if values else None

    def read(self, kind: type[T], *names: str, default: T | None = None) -> T:
        """The field as `kind`. Without a default the field is required."""
        value = self.raw(*names)
        if value is None:
            if default is None:
                spelled = " (or ".join(names) + ")" * (len(names) - 1)
                raise ValueError(f"{self.where} lacks {spelled}{did_you_mean(names[0], self.values)}")
            return default
        return self._typed(kind, value, names[0])

    def integers(self, *names: str, default: int | None = None) -> tuple[int, ...]:
        """A field that is one integer or a list of them (one for each modality)."""
        value = self.raw(*names)
        if not isinstance(value, list | tuple):
            return (self.read(int, *names, default=default),)
        if not value:
            raise ValueError(f"{self.where}: {names[0]} is an empty list")
        return tuple(self._typed(int, item, names[0]) for item in value)

    def section(self, *names: str) -> HfFields | None:
        """A nested object, None when there is none."""
        value = self.raw(*names)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise ValueError(f"{self.where}: {names[0]}={value!r}; expected an object")
        return HfFields(value, f"{self.where}: {names[0]}")

    def warn_unread(self) -> None:
        """Log the keys that nobody read and that are not known bookkeeping: they may matter to a newer model."""
        unread = sorted(set(self.values) - self._read - BOOKKEEPING)
        if unread:
            logger.warning("%s: keys without a meaning here are ignored: %s", self.where, ", ".join(unread))

    def _typed(self, kind: type[T], value: Any, name: str) -> T:
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return kind(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"{self.where}: {name}={value!r} ({type(value).__name__}); expected {kind.__name__}")
        return value
