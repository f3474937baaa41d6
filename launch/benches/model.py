"""The model every speed bench uses unless told otherwise, its options, and what it costs. B batch, T tokens, E experts, K chosen.

By default 25.7 million active parameters: eight layers of width 512, the first dense, 32 experts of width 256 of which four
are chosen, one shared expert; 166.6 MFLOP a trained token at 512 tokens a row.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import numpy as np

from ernie_jax.config import ModelConfig, MoEConfig
from ernie_jax.config.run import DataConfig, MeshConfig, RunConfig, ScheduleConfig
from ernie_jax.train.flops import flops_per_token, layer_parameters, matmul_parameters

BYTES = {"float32": 4, "bfloat16": 2}
# Option -> (default, least, help).
SIZES = {
    "hidden": (512, 1, "hidden size"),
    "layers": (8, 2, "layers, the first dense, the rest MoE"),
    "heads": (8, 1, "query heads"),
    "kv_heads": (2, 1, "key and value heads"),
    "head_dim": (64, 2, "width of a head"),
    "dense_width": (1536, 1, "width of the dense layer's MLP"),
    "experts": (32, 1, "routed experts of a layer"),
    "experts_per_token": (4, 1, "experts chosen for a token"),
    "width": (256, 1, "width of an expert"),
    "vocab": (8192, 8, "vocabulary"),
}


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the sizes of the model, its number format and the seed."""
    for name, (default, _, text) in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=text)
    parser.add_argument("--dtype", choices=BYTES, default="float32", help="number format of our activations and products")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the tokens")


def check_at_least(options: Mapping[str, object], **least: int) -> None:
    """Refuses sizes of the model, and those named, that are too small.

    Raises:
      ValueError: naming the option.
    """
    for name, bound in {**{name: size[1] for name, size in SIZES.items()}, **least}.items():
        value = options[name]
        if isinstance(value, int) and value < bound:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {bound}, got {value}")


def model_config(options: Mapping[str, object], *, tokens: int) -> ModelConfig:
    """The model these options describe, with at least `tokens` positions.

    Raises:
      ValueError: sizes that do not fit each other.
    """
    o = {name: int(options[name]) for name in SIZES}  # type: ignore[call-overload]
    return ModelConfig(
        vocab_size=o["vocab"],
        hidden_size=o["hidden"],
        intermediate_size=o["dense_width"],
        num_hidden_layers=o["layers"],
        num_attention_heads=o["heads"],
        num_key_value_heads=o["kv_heads"],
        head_dim=o["head_dim"],
        tie_word_embeddings=True,
        max_position_embeddings=max(tokens, 4096),
        moe=MoEConfig(
            num_experts=o["experts"],
            num_experts_per_tok=o["experts_per_token"],
            intermediate_size=o["width"],
            num_shared_experts=1,
            layer_start=1,
        ),
    )


def run_config(
    options: Mapping[str, object], *, batch_size: int, tokens: int, mesh: Mapping[str, int] | None = None, **sections: Any
) -> RunConfig:
    """A training run of that model with the library's defaults, at a constant learning rate; `sections` are further ones.

    Raises:
      ValueError: sizes that do not fit each other.
    """
    return RunConfig(
        model=model_config(options, tokens=tokens),
        steps=1_000_000,
        batch_size=batch_size,
        seq_len=tokens,
        dtype=str(options["dtype"]),
        seed=int(options["seed"]),  # type: ignore[call-overload]
        mesh=MeshConfig(**(mesh or {})),
        schedule=ScheduleConfig(kind="constant"),
        data=DataConfig(kind="standard_library"),
        **sections,
    )


def random_tokens(options: Mapping[str, object], batch_size: int, tokens: int) -> np.ndarray:
    """Token ids [B, T], the same for every side; none of them special."""
    rng = np.random.default_rng(int(options["seed"]))  # type: ignore[call-overload]
    return rng.integers(3, int(options["vocab"]), (batch_size, tokens)).astype(np.int32)  # type: ignore[call-overload]


def train_flops(config: ModelConfig, batch_size: int, tokens: int) -> float:
    """Model FLOPs of one training step."""
    return batch_size * tokens * flops_per_token(config, tokens)


def prefill_flops(config: ModelConfig, batch_size: int, tokens: int) -> float:
    """Model FLOPs of reading B rows of T tokens, with logits of each row's last token only.

    Of the last layer nobody needs more than keys and values of the tokens before the last; the rest is not counted.
    """
    head, last = config.hidden_size * config.vocab_size, layer_parameters(config, config.layer_kinds[-1])
    keys_and_values = 2 * config.hidden_size * config.num_key_value_heads * config.head_dim
    products = tokens * (matmul_parameters(config) - head - last) + (tokens - 1) * keys_and_values + last + head
    one = _attention_flops(config, 1) / config.num_hidden_layers
    pairs = (config.num_hidden_layers - 1) * tokens * tokens / 2 + tokens
    return batch_size * (2 * products + one * pairs)


def decode_flops(config: ModelConfig, batch_size: int, context: float) -> float:
    """Model FLOPs of one decode step of B rows that see `context` tokens each."""
    return batch_size * (2 * matmul_parameters(config) + _attention_flops(config, context))


def decode_weights(config: ModelConfig, batch_size: int) -> float:
    """Weights one decode step of B rows has to read once: all matrices, and of the experts those routed to.

    Of E experts, B independent even choices of K reach `E (1 - (1 - K/E)^B)` on average.
    """
    moe = config.moe
    assert moe is not None
    reached = moe.num_experts * (1 - (1 - moe.num_experts_per_tok / moe.num_experts) ** batch_size)
    expert = 3 * config.hidden_size * moe.intermediate_size
    return matmul_parameters(config) + config.num_moe_layers * expert * (reached - moe.num_experts_per_tok)


def _attention_flops(config: ModelConfig, context: float) -> float:
    return 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * context
