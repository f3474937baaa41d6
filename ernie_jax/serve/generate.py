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

from ernie_jax.models import TextInputs, TextModel
from ernie_jax.nn.kv_cache import KVCache
from ernie_jax.serve.sampling import SamplingConfig, SamplingRows, sample

# Prompts are padded to a multiple of this, so that prompts of similar length share one compiled program.
PROMPT_MULTIPLE = 16


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
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 64,
    sampling: SamplingConfig | Sequence[SamplingConfig] = SamplingConfig(),
    stop_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
    cache_length: int | None = None,
) -> list[Completion]:
    """Continue each prompt; rows of different length and with different settings share a batch without touching each other.

    Args:
      model: the model, on its mesh.
      prompts: token ids, one list a row.
      max_new_tokens: most new tokens of a row.
      sampling: one setting for all rows (row r then draws with seed + r), or one a row.
      stop_token_ids: tokens that end a row, for all rows or one list a row; the model's end token by default.
      cache_length: slots of the key/value cache; by default what prompt and max_new_tokens need, at most the model's
        max_position_embeddings. A row that reaches the end finishes with `length`.

    Returns:
      One Completion a prompt, in order.

    Raises:
      ValueError: no prompts, an empty prompt, one that does not fit the cache, ids outside the vocabulary, bad settings.
    """
    rows = _checked_prompts(model, prompts, max_new_tokens)
    limit = model.config.max_position_embeddings
    longest = max(map(len, rows))
    padded = -(-longest // PROMPT_MULTIPLE) * PROMPT_MULTIPLE
    # Padding holds slots but no positions, so it may go beyond the limit where tokens may not.
    wanted = cache_length if cache_length is not None else min(longest + max_new_tokens, limit)
    if longest >= wanted:
        raise ValueError(
            f"a prompt of {longest} tokens leaves no room in a cache of {wanted} slots (the model has {limit} positions); "
            "shorten the prompt, or give a longer cache_length"
        )
    new_tokens = min(max_new_tokens, wanted - longest)
    settings = _rows_of(sampling, len(rows))
    ids = np.zeros((len(rows), padded), np.int32)
    segments = np.zeros((len(rows), padded), np.int32)
    for i, row in enumerate(rows):
        ids[i, padded - len(row) :] = row
        segments[i, padded - len(row) :] = 1
    stops = _stops_of(stop_token_ids, len(rows), model.config.eos_token_id)
    graphdef, state = nnx.split(model)
    arrays = (state, ids, segments, SamplingRows.of(settings), stops, np.int32(new_tokens))
    # The buffer is sized by what was asked for, the loop by what fits: nearby lengths share a program.
    tokens, counts, stopped = jax.device_get(_generate(graphdef, max_new_tokens, *arrays))
    return [Completion(tokens[i, : counts[i]].tolist(), "stop" if stopped[i] else "length") for i in range(len(rows))]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _generate(
    graphdef: Any,
    buffer: int,
    state: Any,
    ids: jax.Array,
    segments: jax.Array,
    sampling: SamplingRows,
    stops: jax.Array,
    new_tokens: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(tokens [B, buffer], number of them [B], whether a stop token ended the row [B])."""
    model: TextModel = nnx.merge(graphdef, state)
    batch, padded = ids.shape
    cache = KVCache.create(model.config, batch, padded + buffer, model.dtypes.compute)
    positions = jnp.maximum(jnp.cumsum(segments, axis=1) - 1, 0)
    logits, cache = model.next_logits(TextInputs(ids, segments, positions), cache)

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
    carry = (cache, logits, positions[:, -1] + 1, jnp.zeros((batch, buffer), jnp.int32), nothing, nothing != 0, jnp.int32(0))
    _, _, _, tokens, counts, stopped, _ = jax.lax.while_loop(unfinished, advance, carry)
    return tokens, counts, stopped


def _checked_prompts(model: TextModel, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
    rows = [[int(token) for token in row] for row in prompts]
    if not rows:
        raise ValueError("no prompts; give at least one list of token ids")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}; expected at least 1")
    for i, row in enumerate(rows):
        if not row:
            raise ValueError(
                f"prompt {i} is empty; give at least one token (the begin token {model.config.bos_token_id}, for example)"
            )
        bad = [token for token in row if not 0 <= token < model.config.vocab_size]
        if bad:
            raise ValueError(f"prompt {i} has token id {bad[0]}; expected ids in 0..{model.config.vocab_size - 1}")
    return rows


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


Prompt = TypeVar("Prompt", str, list[str])


def generate(
    model: TextModel,
    tokenizer: TextCodec,
    prompt: Prompt,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_token_ids: Sequence[int] | None = None,
    cache_length: int | None = None,
) -> Prompt:
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
