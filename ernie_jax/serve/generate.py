"""Plain generation: one prefill, then a loop on the device. B rows, P prompt tokens after padding, S cache slots."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ernie_jax.models import MultimodalInputs, TextInputs, TextModel
from ernie_jax.nn.kv_cache import KVCache
from ernie_jax.serve.prompts import Prompt, checked_prompts, padded
from ernie_jax.serve.sampling import SamplingConfig, SamplingRows, sample


class TextCodec(Protocol):
    """What generation needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Text of token ids, special tokens left out."""
        ...


@dataclass(frozen=True)
class Completion:
    """What followed one prompt.

    Attributes:
      token_ids: the new tokens, without the stop token.
      finish_reason: `stop` after a stop token, `length` at max_new_tokens or at the end of the cache.
    """

    token_ids: list[int]
    finish_reason: str


def generate_tokens(
    model: TextModel,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 64,
    sampling: SamplingConfig | Sequence[SamplingConfig] = SamplingConfig(),
    stop_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
    cache_length: int | None = None,
) -> list[Completion]:
    """Continue each prompt; rows of different length and with different settings share a batch without touching each other.

    Args:
      model: the model, on its mesh.
      prompts: one a row: token ids, or a `MultimodalPrompt` with images and videos; of either kind in one batch. What is
        generated behind images goes on at the largest position of the prompt plus one, and to the text experts.
      max_new_tokens: most new tokens of a row.
      sampling: one setting for all rows (row r then draws with seed + r), or one a row.
      stop_token_ids: tokens that end a row, for all rows or one list a row; the model's end token by default.
      cache_length: slots of the key/value cache; by default what prompt and max_new_tokens need, at most the model's
        max_position_embeddings. A row that reaches the end finishes with `length`.

    Returns:
      One Completion a prompt, in order.

    Raises:
      ValueError: no prompts, an empty prompt, one that does not fit the cache, ids outside the vocabulary, images that do not
        fit their placeholders, bad settings.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}; expected at least 1")
    rows = checked_prompts(model.config, prompts)
    limit = model.config.max_position_embeddings
    longest = max(len(row.ids) for row in rows)
    # Padding holds slots but no positions, so it may go beyond the limit where tokens may not.
    wanted = cache_length if cache_length is not None else min(longest + max_new_tokens, limit)
    if longest >= wanted:
        raise ValueError(
            f"a prompt of {longest} tokens leaves no room in a cache of {wanted} slots (the model has {limit} positions); "
            "shorten the prompt, or give a longer cache_length"
        )
    new_tokens = min(max_new_tokens, wanted - longest)
    settings = _rows_of(sampling, len(rows))
    stops = _stops_of(stop_token_ids, len(rows), model.config.eos_token_id)
    graphdef, state = nnx.split(model)
    batch = padded(rows, model.config.vision, model.layout)
    arrays = (state, batch, SamplingRows.of(settings), stops, np.int32(new_tokens))
    # The buffer is sized by what was asked for, the loop by what fits: nearby lengths share a program.
    tokens, counts, stopped = jax.device_get(_generate(graphdef, max_new_tokens, *arrays))
    return [Completion(tokens[i, : counts[i]].tolist(), "stop" if stopped[i] else "length") for i in range(len(rows))]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _generate(
    graphdef: Any,
    buffer: int,
    state: Any,
    prompts: tuple[jax.Array, jax.Array] | MultimodalInputs,
    sampling: SamplingRows,
    stops: jax.Array,
    new_tokens: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(tokens [B, buffer], number of them [B], whether a stop token ended the row [B])."""
    model: TextModel = nnx.merge(graphdef, state)
    inputs: TextInputs = prompts if isinstance(prompts, MultimodalInputs) else _text_inputs(*prompts)
    batch, length = inputs.input_ids.shape
    cache = KVCache.create(model.config, batch, length + buffer, model.dtypes.compute)
    logits, cache = model.next_logits(inputs, cache)
    # A long video may reach positions beyond the last token's; what follows begins behind them all.
    three = inputs.position_ids.ndim == 3
    last = inputs.position_ids.max(axis=(1, 2)) if three else inputs.position_ids[:, -1]

    def unfinished(carry: tuple[Any, ...]) -> jax.Array:
        _, _, _, _, _, stopped, step = carry
        return (step < new_tokens) & ~jnp.all(stopped)

    def advance(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        cache, logits, position, tokens, counts, stopped, step = carry
        token = sample(logits, sampling, step)
        stopped = stopped | jnp.any(token[:, None] == stops, axis=1)
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, token[:, None], step, axis=1)
        counts = counts + ~stopped
        # A finished row goes on as padding: it sees nothing and nothing sees it.
        inputs = TextInputs(token[:, None], (~stopped).astype(jnp.int32)[:, None], position[:, None])
        logits, cache = model.next_logits(inputs, cache)
        return cache, logits, position + 1, tokens, counts, stopped, step + 1

    nothing = jnp.zeros((batch,), jnp.int32)
    carry = (cache, logits, last + 1, jnp.zeros((batch, buffer), jnp.int32), nothing, nothing != 0, jnp.int32(0))
    _, _, _, tokens, counts, stopped, _ = jax.lax.while_loop(unfinished, advance, carry)
    return tokens, counts, stopped


def _text_inputs(ids: jax.Array, segments: jax.Array) -> TextInputs:
    """[B, P] tokens with padding on the left."""
    return TextInputs(ids, segments, jnp.maximum(jnp.cumsum(segments, axis=1) - 1, 0))


def _rows_of(sampling: SamplingConfig | Sequence[SamplingConfig], count: int) -> list[SamplingConfig]:
    if isinstance(sampling, SamplingConfig):
        s = sampling
        return [SamplingConfig(temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, seed=s.seed + row) for row in range(count)]
    if len(sampling) != count:
        raise ValueError(f"{len(sampling)} sampling settings for {count} prompts; give one for all, or one a prompt")
    return list(sampling)


def _stops_of(stops: Sequence[Any] | None, count: int, default: int) -> np.ndarray:
    """[B, n] stop ids, -1 where a row has fewer."""
    if stops is None:
        stops = [default]
    per_row = [list(row) for row in stops] if stops and np.iterable(stops[0]) else [list(stops)] * count
    if len(per_row) != count:
        raise ValueError(f"stop_token_ids has {len(per_row)} rows for {count} prompts; give one list for all, or one a prompt")
    width = max(1, *(len(row) for row in per_row))
    return np.array([[*row, *[-1] * (width - len(row))] for row in per_row], np.int32)


Texts = TypeVar("Texts", str, list[str])


def generate(
    model: TextModel,
    tokenizer: TextCodec,
    prompt: Texts,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_token_ids: Sequence[int] | None = None,
    cache_length: int | None = None,
) -> Texts:
    """The text that follows a prompt, or each of several; greedy unless a temperature is given.

    Args:
      model: the model.
      tokenizer: turns text to ids and back.
      prompt: a text, or a list of texts.
      max_new_tokens, stop_token_ids, cache_length: see `generate_tokens`.
      temperature, top_k, top_p, seed: see `SamplingConfig`.

    Returns:
      The new text (not the prompt), a string for a string and a list for a list.

    Raises:
      ValueError: as `generate_tokens`.
    """
    texts = [prompt] if isinstance(prompt, str) else prompt
    completions = generate_tokens(
        model,
        [tokenizer.encode(text) for text in texts],
        max_new_tokens=max_new_tokens,
        sampling=SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed),
        stop_token_ids=stop_token_ids,
        cache_length=cache_length,
    )
    answers = [tokenizer.decode(c.token_ids) for c in completions]
    return answers[0] if isinstance(prompt, str) else answers
