"""Answers to chats of text, images and videos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, TypeVar, cast

from ernie_jax.config.model import ModelConfig
from ernie_jax.data.chat import (
    STOP_TOKENS,
    BuiltinTemplate,
    ChatTemplate,
    EncodedChat,
    JinjaTemplate,
    checked_messages,
    encode_chat,
)
from ernie_jax.data.chat.builtin import BEGIN, END
from ernie_jax.data.chat.messages import Media
from ernie_jax.data.chat.parts import ASSISTANT_MARKERS
from ernie_jax.data.tokenizer import Tokenizer
from ernie_jax.data.vision import ImageProcessor, VideoProcessor, VisionPatches, num_tokens
from ernie_jax.models import TextModel
from ernie_jax.serve.generate import generate_tokens
from ernie_jax.serve.prompts import MultimodalPrompt
from ernie_jax.serve.sampling import SamplingConfig

Conversation: TypeAlias = Sequence[Mapping[str, Any]]
Processor = TypeVar("Processor", ImageProcessor, VideoProcessor)


def chat(
    model: TextModel,
    tokenizer: Tokenizer,
    messages: Conversation | Sequence[Conversation],
    *,
    template: ChatTemplate | None = None,
    image_processor: ImageProcessor | None = None,
    video_processor: VideoProcessor | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    enable_thinking: bool | None = None,
) -> str | list[str]:
    """The assistant's answer to a conversation, or to each of several; greedy unless a temperature is given.

    Args:
      model: the model.
      tokenizer: its tokenizer.
      messages: a conversation, or several: mappings with `role` and `content`, see `checked_messages`. An item
        `{"type": "image", "image": ...}` holds anything `read_image` takes, `{"type": "video", "video": ...}` anything
        `open_video` takes.
      template: of `chat_template_of`. By default the tokenizer's own `chat_template.jinja`, or where it has none the built-in
        one of kind `vl` for a vision-language model and `text` for others; a thinking model needs its own given.
      image_processor, video_processor: by default the published settings at the model's patch and merge size.
      max_new_tokens: most tokens of an answer.
      temperature, top_k, top_p, seed: see `SamplingConfig`.
      enable_thinking: see the template; None is its default.

    Returns:
      The answer's text, a string for one conversation and a list for several. Thinking that the model writes out is part of it,
      up to the tag `</think>`: put back as the assistant's content, the template takes it for what it is.

    Raises:
      ValueError: messages the template does not take, images that cannot be read, images for a text model, processors of another
        patch size than the model's; before anything is generated.
    """
    single = not messages or isinstance(messages[0], Mapping)
    conversations = cast("list[Conversation]", [messages] if single else list(messages))
    template = _default_template(model.config, tokenizer) if template is None else template
    kinds = [[item.kind for m in checked_messages(c) for item in m.items if isinstance(item, Media)] for c in conversations]
    if model.config.vision is None and any(kinds):
        raise ValueError("the messages hold images or videos, and this is a text model; use a vision-language model")
    processors = _processors(model.config, image_processor, video_processor)

    def encode(conversation: Conversation, media_tokens: Sequence[int]) -> EncodedChat:
        options: dict[str, Any] = {"add_generation_prompt": True, "enable_thinking": enable_thinking}
        return encode_chat(conversation, tokenizer, template, media_tokens=media_tokens, **options)

    # A draft of each, as if every image were one token: a mistake in the last message is told before the first image is read.
    encoded = [encode(conversation, [1] * len(found)) for conversation, found in zip(conversations, kinds, strict=True)]
    patches = [_patches(conversation, processors) for conversation in conversations]
    for i, read in enumerate(patches):
        if read:
            encoded[i] = encode(
                conversations[i], [num_tokens(p.grid_thw, processors["image"].merge_size, kind=p.kind) for p in read]
            )
    prompts = [MultimodalPrompt.of_chat(*pair) for pair in zip(encoded, patches, strict=True)]
    completions = generate_tokens(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed),
        stop_token_ids=stop_ids(model.config, tokenizer, template),
    )
    answers = [_answer(tokenizer, completion.token_ids) for completion in completions]
    return answers[0] if single else answers


def stop_ids(config: ModelConfig, tokenizer: Tokenizer, template: ChatTemplate) -> list[int]:
    """Tokens that end an answer: the model's and the tokenizer's end, and those of the template's kind."""
    names = {*STOP_TOKENS[template.kind], template.end_of_turn}
    known = [index for name, index in tokenizer.special_tokens.items() if name in names]
    return sorted({config.eos_token_id, tokenizer.eos_token_id, *known})


def _default_template(config: ModelConfig, tokenizer: Tokenizer) -> ChatTemplate:
    kind = "text" if config.vision is None else "vl"
    if tokenizer.chat_template is None:
        return BuiltinTemplate(kind)
    # Names that published templates ask for.
    by_id = {index: name for name, index in tokenizer.special_tokens.items()}
    ids = {"bos_token": tokenizer.bos_token_id, "eos_token": tokenizer.eos_token_id, "pad_token": tokenizer.pad_token_id}
    names = {name: by_id[index] for name, index in ids.items() if index in by_id}
    names |= {name: token for name, token in (("cls_token", BEGIN), ("sep_token", END)) if token in tokenizer.special_tokens}
    return JinjaTemplate(tokenizer.chat_template, kind, source="the tokenizer's chat_template.jinja", names=names)


class _Processors(TypedDict):
    """By the type of an item."""

    image: ImageProcessor
    video: VideoProcessor


def _processors(config: ModelConfig, images: ImageProcessor | None, videos: VideoProcessor | None) -> _Processors:
    if config.vision is None:
        return {"image": ImageProcessor(), "video": VideoProcessor()}
    sizes: dict[str, Any] = {"patch_size": config.vision.patch_size, "merge_size": config.vision.spatial_merge_size}

    def checked(name: str, processor: Processor) -> Processor:
        wrong = {field: getattr(processor, field) for field, value in sizes.items() if getattr(processor, field) != value}
        if wrong:
            raise ValueError(f"the {name} has {wrong}, the model has {sizes}; give a processor of the model's sizes")
        return processor

    return {
        "image": checked("image_processor", ImageProcessor(**sizes) if images is None else images),
        "video": checked("video_processor", VideoProcessor(**sizes) if videos is None else videos),
    }


def _patches(conversation: Conversation, processors: _Processors) -> list[VisionPatches]:
    """Of each image and video, in order of appearance."""
    items = [item for message in conversation if not isinstance(message["content"], str) for item in message["content"]]
    patches: list[VisionPatches] = []
    for item in items:
        if item["type"] == "image":
            patches.append(processors["image"](item["image"]))
        elif item["type"] == "video":
            patches.append(processors["video"](item["video"]))
    return patches


def _answer(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text, with the tags that an assistant may write and without other special tokens."""
    names = {index: name for name, index in tokenizer.special_tokens.items()}
    # `decode` leaves special tokens out, but not everything that is spelled as a marker; alone they show which.
    hidden = {i for i in set(ids) & names.keys() if names[i] not in ASSISTANT_MARKERS and not tokenizer.decode([i])}
    return tokenizer.decode([i for i in ids if i not in hidden], skip_special=False)
