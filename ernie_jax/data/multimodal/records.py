"""Records of a multimodal source: a conversation with images and videos, or a text."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etils import epath

from ernie_jax.data.chat.messages import checked_messages
from ernie_jax.data.shards import BadRecordError, JsonlShard
from ernie_jax.data.sources import Records

_MEDIA = ("image", "video")


@dataclass(frozen=True)
class MediaItem:
    """An image or video of a conversation.

    Attributes:
      kind: `image` or `video`.
      source: a path or `data:` URL; of a video perhaps a list of them, one a frame.
    """

    kind: str
    source: Any


@dataclass(frozen=True)
class Record:
    """What one line or file holds.

    Attributes:
      where: names the file and line in messages.
      text: of a plain document; None for a conversation.
      messages: of a conversation.
      media: its images and videos in order of appearance, their paths resolved.
    """

    where: str
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    media: tuple[MediaItem, ...] = ()


def read_record(records: Records, index: int) -> Record:
    """Record `index`: a JSONL object with `messages` is a conversation; with the text field, or of another format, it is a text.

    Paths of images and videos are relative to the JSONL file; absolute ones, `data:` URLs and `gs://...` are taken as they are.

    Raises:
      BadRecordError: not JSON, neither or both of messages and text, or messages that `checked_messages` refuses.
    """
    shard, local = records.locate(index)
    if not isinstance(shard, JsonlShard):
        # The shard names its place itself where it finds an error, and of a text there is no other.
        return Record("", text=shard.text(local))
    where = shard.where(local)
    fields = shard.record(local)
    if fields is None:
        return Record(where, text="")
    if "messages" not in fields:
        return Record(where, text=shard.text_of(fields, local))
    if shard.text_field in fields:
        raise BadRecordError(f"{where}: the record has both 'messages' and {shard.text_field!r}; expected one of them")
    try:
        checked_messages(fields["messages"])
        media = tuple(_media(fields["messages"], str(shard.path)))
    except ValueError as error:
        raise BadRecordError(f"{where}: {error}") from error
    return Record(where, messages=tuple(fields["messages"]), media=media)


def _media(messages: Sequence[Mapping[str, Any]], file: str) -> list[MediaItem]:
    found = []
    for number, message in enumerate(messages):
        items = message["content"] if not isinstance(message["content"], str) else ()
        for item in items:
            kind = item["type"]
            if kind in _MEDIA:
                value = item[kind]
                frames = kind == "video" and isinstance(value, list)
                if frames and not value:
                    raise ValueError(f"message {number} has a video without frames")
                resolved = [_resolved(part, file, number, kind) for part in (value if frames else [value])]
                found.append(MediaItem(kind, resolved if frames else resolved[0]))
    return found


def _resolved(value: Any, file: str, number: int, kind: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"message {number} has the {kind} {value!r}; expected a path or a data: URL")
    if value.startswith(("data:", "/")) or "://" in value:
        return value
    if "://" in file:
        return posixpath.join(posixpath.dirname(file), value)
    return str(epath.Path(file).parent / value)
