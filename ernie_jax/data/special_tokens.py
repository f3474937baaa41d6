"""Special tokens: which added tokens are markers that plain text must never become, and text cut at those it may hold."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

# Keys of tokenizer_config.json and special_tokens_map.json that name one token, or a list of them.
_SINGLE = ("unk_token", "pad_token", "bos_token", "eos_token", "cls_token", "sep_token", "mask_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")


@dataclasses.dataclass(frozen=True)
class AddedToken:
    """A token beside the learnt pieces: its id, and whether its file calls it special (`decode` leaves those out)."""

    index: int
    special: bool


def is_marker(token: str, special: bool) -> bool:
    """Whether an added token is a marker, which plain text never becomes, and not a piece of text.

    Markers are the special tokens, and those spelled in angle or square brackets (`<|LOC_1|>`, `<think>`) even where their
    file does not call them special: a user who types one must not point at a place in an image or end a thought.
    One character is always text: published files list the digits `0` to `9` among the special tokens.
    """
    return len(token) > 1 and (special or token[0] + token[-1] in ("<>", "[]"))


def named_tokens(*files: Mapping[str, Any]) -> set[str]:
    """Tokens that a `tokenizer_config.json` or `special_tokens_map.json` names, single characters left out."""
    found: list[Any] = []
    for contents in files:
        found += [contents.get(key) for key in _SINGLE]
        for key in _LISTS:
            listed = contents.get(key) or ()
            found += listed.values() if isinstance(listed, Mapping) else listed
    spelled = (token_text(token) for token in found)
    return {token for token in spelled if token is not None and len(token) > 1}


def token_text(token: Any) -> str | None:
    """The spelling of a token in a JSON file: a string, or an object with `content`."""
    spelled = token.get("content") if isinstance(token, Mapping) else token
    return spelled if isinstance(spelled, str) and spelled else None


def near_names(name: str, names: Iterable[str]) -> str:
    """`; did you mean ...?` with the names most like this one, or nothing."""
    near = difflib.get_close_matches(name, list(names), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def pattern_of(names: Collection[str]) -> re.Pattern[str] | None:
    """A pattern that finds any of the names, the longest first where several begin at one place; None for no names."""
    if not names:
        return None
    return re.compile("|".join(re.escape(name) for name in sorted(names, key=lambda name: (-len(name), name))))


def split_at(text: str, pattern: re.Pattern[str] | None, ids: Mapping[str, int]) -> list[str | int]:
    """The text cut at the names that the pattern finds: plain stretches as strings, names as their ids."""
    if pattern is None:
        return [text] if text else []
    parts: list[str | int] = []
    end = 0
    for match in pattern.finditer(text):
        if match.start() > end:
            parts.append(text[end : match.start()])
        parts.append(ids[match.group()])
        end = match.end()
    if end < len(text):
        parts.append(text[end:])
    return parts
