"""What a rendered chat is made of: stretches of text, and slots where an image or a video stands. Never one string."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Literal, TypeAlias

MediaKind: TypeAlias = Literal["image", "video"]

# What an assistant's own text may hold as tokens: it generates them itself. Turn and media markers it can never hold.
ASSISTANT_MARKERS = frozenset({"<think>", "</think>", "<response>", "</response>", "<tool_call>", "</tool_call>"})


@dataclasses.dataclass(frozen=True)
class Text:
    """A stretch of text.

    Attributes:
      text: the characters.
      special: whether special tokens in it become their ids: all (the template's own words), the named, or none (a user's).
        A special token never spans two stretches.
      trained: whether a model is trained to write it.
    """

    text: str
    special: bool | Collection[str] = False
    trained: bool = False


@dataclasses.dataclass(frozen=True)
class Slot:
    """The place of one image or video, its start and end markers included."""

    kind: MediaKind


Part: TypeAlias = Text | Slot
