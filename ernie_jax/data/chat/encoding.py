"""A chat as ids: which are trained, which stand for images and videos. T ids."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ernie_jax.data.chat.media_tokens import MediaTokens
from ernie_jax.data.chat.messages import checked_messages
from ernie_jax.data.chat.parts import MediaKind, Part, Slot
from ernie_jax.data.chat.templates import ChatTemplate
from ernie_jax.data.tokenizer import Tokenizer

_TYPE = {"image": 1, "video": 2}


@dataclasses.dataclass(frozen=True)
class EncodedChat:
    """A chat as ids.

    Attributes:
      input_ids: int32 [T].
      trained: bool [T], in the positions of `input_ids` (not shifted): True on an assistant's tokens and on the token that
        ends its turn.
      media_kinds: "image" or "video" for each, in order of appearance.
      mm_token_type_ids: int32 [T], 1 on image placeholders, 2 on video placeholders, 0 elsewhere; positions follow these.
      moe_mm_token_type_ids: int32 [T], the same and also 1 or 2 on the start and end markers; routing follows these.
    """

    input_ids: np.ndarray
    trained: np.ndarray
    media_kinds: tuple[MediaKind, ...]
    mm_token_type_ids: np.ndarray
    moe_mm_token_type_ids: np.ndarray


def encode_chat(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    *,
    add_generation_prompt: bool,
    enable_thinking: bool | None = None,
    media_tokens: Sequence[int] = (),
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> EncodedChat:
    """Ids of a chat.

    Only the template's own words become special tokens; special tokens that a message spells are plain text, except the
    thinking, response and tool-call tags in an assistant's. Where the vocabulary lacks a token of the template (`<think>` in
    a small one), that is plain text too. Text and template are encoded together, as `transformers` does, but an assistant's
    words apart from what stands before them, so that the ids up to an answer are those of the prompt it is generated from.

    Args:
      messages: see `checked_messages`.
      tokenizer: the tokenizer.
      template: of `chat_template_of`.
      add_generation_prompt: end with the words after which the assistant's answer begins.
      enable_thinking: see the template; None is its default.
      media_tokens: number of placeholders of each image and video, in order of appearance in the messages.
      tools: descriptions of functions that the assistant may call.

    Raises:
      ValueError: messages or an order of them that the template does not have, another number of images and videos than
        `media_tokens`, a tokenizer without the end of a turn, or without the tokens of images and videos where there are any.
    """
    checked = checked_messages(messages)
    _check_tools(tools)
    parts = template.parts(
        checked,
        add_generation_prompt=add_generation_prompt,
        enable_thinking=enable_thinking,
        tools=tools,
        special_tokens=tokenizer.special_tokens.keys(),
    )
    kinds = tuple(part.kind for part in parts if isinstance(part, Slot))
    if len(kinds) != len(media_tokens):
        raise ValueError(f"the messages hold {len(kinds)} images and videos, but media_tokens has {len(media_tokens)} numbers")
    if any(count < 1 for count in media_tokens):
        raise ValueError(f"media_tokens is {list(media_tokens)}; every image and video has at least one token")
    end = template.end_of_turn
    if end is not None and end not in tokenizer.special_tokens and any(message.role == "assistant" for message in checked):
        raise ValueError(
            f"the tokenizer has no special token {end!r}, with which the chat template {template.kind!r} ends an answer; "
            "use the model's own tokenizer, or give the token to train_tokenizer in special_tokens"
        )
    return _encoded(parts, tokenizer, kinds, media_tokens)


def _check_tools(tools: Any) -> None:
    if tools is None:
        return
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f"tools is {tools!r}; expected a list of mappings, each the description of a function")
    try:
        json.dumps(tools)
    except TypeError as error:
        raise ValueError(f"tools cannot be written as JSON: {error}") from error


def _encoded(parts: Sequence[Part], tokenizer: Tokenizer, kinds: tuple[MediaKind, ...], counts: Sequence[int]) -> EncodedChat:
    media = MediaTokens.of(tokenizer) if kinds else None
    ids: list[int] = []
    trained: list[bool] = []
    placeholder: list[int] = []
    routed: list[int] = []

    def put(indices: Sequence[int], is_trained: bool = False, placeholder_type: int = 0, routing_type: int = 0) -> None:
        ids.extend(indices)
        trained.extend([is_trained] * len(indices))
        placeholder.extend([placeholder_type] * len(indices))
        routed.extend([routing_type] * len(indices))

    # Plain text that is encoded as one; it ends at a special token, at a slot, and where trained text begins or ends.
    waiting, waiting_trained = "", False

    def flush() -> None:
        nonlocal waiting
        put(tokenizer.encode(waiting), waiting_trained)
        waiting = ""

    remaining = iter(counts)
    for part in parts:
        if isinstance(part, Slot):
            assert media is not None
            flush()
            image = part.kind == "image"
            start, body, stop = (
                (media.image_start, media.image, media.image_end) if image else (media.video_start, media.video, media.video_end)
            )
            kind = _TYPE[part.kind]
            put([start], routing_type=kind)
            put([body] * next(remaining), placeholder_type=kind, routing_type=kind)
            put([stop], routing_type=kind)
            continue
        allowed = part.special
        if not isinstance(allowed, bool):
            allowed = [name for name in allowed if name in tokenizer.special_tokens]
        if part.trained != waiting_trained:
            flush()
            waiting_trained = part.trained
        for piece in tokenizer.split_special(part.text, allowed):
            if isinstance(piece, str):
                waiting += piece
            else:
                flush()
                put([piece], part.trained)
    flush()
    return EncodedChat(
        input_ids=np.asarray(ids, np.int32),
        trained=np.asarray(trained, np.bool_),
        media_kinds=kinds,
        mm_token_type_ids=np.asarray(placeholder, np.int32),
        moe_mm_token_type_ids=np.asarray(routed, np.int32),
    )
