"""The chat templates of ERNIE 4.5, for checkpoints that bring none: text, vl, thinking, vl-thinking.

Formats: `transformers`' conversion scripts of ERNIE 4.5 and 4.5 VL, and PaddleFormers' templates `ernie` and `ernie_vl`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ernie_jax.data.chat.messages import Media, Message
from ernie_jax.data.chat.parts import ASSISTANT_MARKERS, Part, Slot, Text

BEGIN, END = "<|begin_of_sentence|>", "<|end_of_sentence|>"
IM_START, IM_END = "<|im_start|>", "<|im_end|>"
_NAMES = {"image": "Picture", "video": "Video"}


def own(text: str, *, trained: bool = False) -> Text:
    """The template's own words."""
    return Text(text, special=True, trained=trained)


def answer(text: str) -> Text:
    """An assistant's words."""
    return Text(text, special=ASSISTANT_MARKERS, trained=True)


class BuiltinTemplate:
    """One of ERNIE's templates.

    Attributes:
      kind: `text`, `vl`, `thinking` or `vl-thinking`.
      end_of_turn: the special token after an assistant's answer.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.end_of_turn: str | None = IM_END if kind == "thinking" else END

    def parts(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        enable_thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        special_tokens: Collection[str] = (),
    ) -> list[Part]:
        """The chat in parts.

        Args:
          messages: of `checked_messages`.
          add_generation_prompt: end with the words after which the assistant's answer begins.
          enable_thinking: whether the answer begins with thinking; None leaves it to the template: no for `vl`, yes for the
            thinking ones. `text` cannot think, `thinking` cannot be kept from it.
          tools: descriptions of functions, for `thinking` only.
          special_tokens: not needed here.

        Raises:
          ValueError: an order of roles, images, tools or thinking that the template does not have.
        """
        _check_order(messages, self.kind, add_generation_prompt)
        if tools and self.kind != "thinking":
            raise ValueError(f"tools are given, but the built-in chat template {self.kind!r} has no place for them")
        if (self.kind, enable_thinking) in (("text", True), ("thinking", False)):
            can = "cannot think" if enable_thinking else "always thinks"
            raise ValueError(f"enable_thinking is {enable_thinking}, but a model of the chat template {self.kind!r} {can}")
        if self.kind == "thinking":
            return _chatml(messages, add_generation_prompt, tools)
        if self.kind == "text":
            return _text(messages, add_generation_prompt)
        return _vision_language(messages, add_generation_prompt, enable_thinking, self.kind == "vl-thinking")


def _check_order(messages: Sequence[Message], kind: str, add_generation_prompt: bool) -> None:
    previous = "system"
    for index, message in enumerate(messages):
        role = message.role
        if role == "tool" and kind != "thinking":
            raise ValueError(f"message {index} is a tool's; the built-in chat template {kind!r} has none")
        if kind in ("text", "thinking") and any(isinstance(item, Media) for item in message.items):
            raise ValueError(f"message {index} holds an image or video; the built-in chat template {kind!r} has none")
        if (role == "assistant" and previous in ("assistant", "system")) or role == previous == "user":
            after = "follows another of the same role" if role == previous else "has no user's message before it"
            raise ValueError(f"message {index} is the {role}'s and {after}; users and assistant take turns")
        previous = role
    if add_generation_prompt and previous in ("assistant", "system"):
        raise ValueError(f"message {len(messages) - 1} is the {previous}'s; a generation prompt needs a user's message before it")


def split_thinking(index: int, text: str) -> tuple[str | None, str]:
    """The thinking of an assistant's text, None where there is none, and the answer after it; line ends around both removed."""
    if "</think>" not in text:
        if "<think>" in text:
            raise ValueError(f"message {index} opens <think> and never closes it; close it, or leave the thinking out")
        return None, text
    thinking, _, rest = text.rpartition("</think>")
    return thinking.rpartition("<think>")[2].strip("\n"), rest.lstrip("\n")


def _text(messages: Sequence[Message], add_generation_prompt: bool) -> list[Part]:
    parts: list[Part] = [own(BEGIN)]
    for message in messages:
        if message.role == "user":
            parts += [own("User: "), Text(message.text), own("\n")]
        elif message.role == "assistant":
            parts += [own("Assistant: "), answer(message.text), own(END, trained=True)]
        else:
            parts += [Text(message.text), own("\n")]
    return [*parts, own("Assistant: ")] if add_generation_prompt else parts


def _vision_language(
    messages: Sequence[Message], add_generation_prompt: bool, enable_thinking: bool | None, thinks: bool
) -> list[Part]:
    """User and Assistant with pictures. The last answer stands where the same settings would have it generated."""
    opening, closing = ("\n<think>\n", "\n</think>\n\n") if thinks else ("<think>", "\n</think>\n")
    # With thinking off the block is closed at once.
    skipped = "\n<think>\n\n</think>\n\n" if thinks else "<think>\n\n</think>\n\n"
    thinking_on = thinks if enable_thinking is None else enable_thinking
    parts: list[Part] = [own(BEGIN)]
    counts = {"image": 0, "video": 0}
    for index, message in enumerate(messages):
        if message.role == "system":
            parts += [Text(message.text), own("\n")]
        elif message.role == "user":
            parts.append(own("User: "))
            for item in message.items:
                if isinstance(item, Media):
                    counts[item.kind] += 1
                    parts += [own(f"{_NAMES[item.kind]} {counts[item.kind]}:"), Slot(item.kind)]
                else:
                    parts.append(Text(item))
        else:
            thinking, rest = split_thinking(index, message.text)
            last = index == len(messages) - 1
            if last and thinking is not None and enable_thinking is False:
                raise ValueError(f"message {index} holds <think>, but enable_thinking is False; take the thinking out")
            parts.append(own("\nAssistant: "))
            if thinking is not None or (last and thinking_on):
                start = "" if opening.endswith("\n") else "\n"
                parts += [own(opening), answer(f"{start}{thinking or ''}{closing}{rest}")]
            else:
                parts += [own(skipped), answer(rest)] if last else [answer(rest)]
            parts.append(own(END, trained=True))
    return [*parts, own("\nAssistant: "), own(opening if thinking_on else skipped)] if add_generation_prompt else parts


def _chatml(messages: Sequence[Message], add_generation_prompt: bool, tools: Sequence[Mapping[str, Any]] | None) -> list[Part]:
    """ChatML with a setting of the system, tools, and answers in <response>."""
    parts: list[Part] = [own(f"{IM_START}system\n")]
    if messages[0].role == "system":
        parts += [own("<system_setting>\n"), Text(messages[0].text), own("\n</system_setting>\n\n")]
    parts.append(own("<global_setting>\nthink_mode=True\n</global_setting>"))
    if tools:
        described = [tool if tool.get("type") == "function" else {"type": "function", "function": tool} for tool in tools]
        listed = ", ".join(json.dumps(tool, ensure_ascii=False) for tool in described)
        parts += [own("\n\n<tool_list>\n["), Text(listed), own("]\n</tool_list>")]
    parts.append(own(f"{IM_END}\n\n"))
    for index, message in enumerate(messages):
        if message.role == "user":
            parts += [own(f"{IM_START}user\n"), Text(message.text), own(f"{IM_END}\n\n")]
        elif message.role == "tool":
            parts += [own(f"{IM_START}user\n<tool_response>\n"), Text(message.text), own(f"\n</tool_response>{IM_END}\n\n")]
        elif message.role == "assistant":
            thinking, rest = split_thinking(index, message.text)
            before = "" if thinking is None else f"<think>\n{thinking}\n</think>\n"
            wrapped = rest.lstrip("\n").startswith(("<response>", "<tool_call>"))
            said = rest if wrapped else f"<response>\n{rest}\n</response>\n"
            parts += [own(f"{IM_START}assistant\n"), answer(before + said), own(IM_END, trained=True), own("\n\n")]
    return [*parts, own(f"{IM_START}assistant\n")] if add_generation_prompt else parts
