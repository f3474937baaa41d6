"""The messages of a chat, checked before any work: roles, kinds of content, order."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ernie_jax.data.chat.parts import MediaKind

ROLES = ("system", "user", "assistant", "tool")
_ITEM_TYPES = ("text", "image", "video")


@dataclasses.dataclass(frozen=True)
class Message:
    """One message: its role, and its items in order: strings for text, `Media` for an image or a video.

    `is_list` tells whether the content was given as a list; a checkpoint's template may look.
    """

    role: str
    items: tuple[str | Media, ...]
    is_list: bool

    @property
    def text(self) -> str:
        """All text of the message."""
        return "".join(item for item in self.items if isinstance(item, str))


@dataclasses.dataclass(frozen=True)
class Media:
    """An image or video in a message; which one is told by its place in the chat."""

    kind: MediaKind


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """The messages of a chat, checked.

    Args:
      messages: mappings with `role` (system, user, assistant or tool) and `content`: a string, or a list of
        `{"type": "text", "text": str}`, `{"type": "image", "image": ...}` and `{"type": "video", "video": ...}`.
        Images and videos stand in the messages of a user or a tool; the system's message comes first.

    Raises:
      ValueError: none of that; names the message by its index from 0.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(f"messages is a {type(messages).__name__}; give a list of messages")
    if not messages:
        raise ValueError("messages is empty; a chat needs at least one message")
    return tuple(_checked(index, message) for index, message in enumerate(messages))


def _checked(index: int, message: Mapping[str, Any]) -> Message:
    here = f"message {index}"
    if not isinstance(message, Mapping):
        raise ValueError(f"{here} is a {type(message).__name__}; expected a mapping with role and content")
    unknown = sorted(map(str, message.keys() - {"role", "content"}))
    if unknown or len(message) < 2:
        raise ValueError(f"{here} has the keys {sorted(map(str, message))}; expected role and content")
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise ValueError(f"{here} has the role {role!r}; expected one of {', '.join(ROLES)}")
    if role == "system" and index > 0:
        raise ValueError(f"{here} is the system's; only message 0 can be")
    if isinstance(content, str):
        return Message(role, (content,), is_list=False)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise ValueError(f"{here} has content of type {type(content).__name__}; expected a string or a list of items")
    if not content:
        raise ValueError(f"{here} has an empty list as content; give a string or at least one item")
    items = tuple(_item(f"{here}, item {number}", item) for number, item in enumerate(content))
    if role in ("system", "assistant") and any(isinstance(item, Media) for item in items):
        raise ValueError(f"{here} is the {role}'s and holds an image or video; only a user's or tool's message can")
    return Message(role, items, is_list=True)


def _item(here: str, item: Any) -> str | Media:
    kind = item.get("type") if isinstance(item, Mapping) else None
    if kind not in _ITEM_TYPES:
        raise ValueError(f"{here} has the type {kind!r}; expected a mapping whose type is text, image or video")
    value = item.get(kind)
    if value is None or (kind == "text" and not isinstance(value, str)):
        raise ValueError(f"{here} has no {kind!r}; expected {'a string' if kind == 'text' else f'the {kind}'} under that key")
    return value if kind == "text" else Media(kind)
