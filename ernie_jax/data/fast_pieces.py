"""The pieces of a `tokenizer.json`, through the `tokenizers` library; and what any such model must offer a `Tokenizer`."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import tokenizers
from tokenizers import pre_tokenizers

from ernie_jax.data.special_tokens import AddedToken, is_marker

BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


class Pieces(Protocol):
    """Plain text to ids, and ids to the bytes they spell.

    Attributes:
      size: one more than the largest id.
      added: tokens beside the learnt pieces, by name.
      has_bytes: whether `bytes_of` is known; without it only whole texts can be decoded, by `decode`.
      strips_first_space: whether a text's first character is dropped where it is a space (the model put it there).
    """

    size: int
    added: Mapping[str, AddedToken]
    has_bytes: bool
    strips_first_space: bool

    def encode(self, text: str) -> list[int]:
        """Ids of the text, in which every marker is plain characters. ValueError for a lone surrogate."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, the model's own way."""

    def bytes_of(self, index: int) -> bytes:
        """UTF-8 bytes that the id spells, perhaps part of a character; none for an id without a piece."""

    def id_of(self, token: str) -> int | None:
        """Id of a piece or added token."""

    def token_of(self, index: int) -> str | None:
        """Piece or added token of an id."""

    def identity(self) -> str:
        """All that decides the ids, as text."""

    def files(self) -> dict[str, bytes]:
        """Contents of the model's own files, by name."""


class FastPieces:
    """`Pieces` of a `tokenizers` model: truncation, padding and the matching of markers in it are switched off."""

    def __init__(self, model: tokenizers.Tokenizer) -> None:
        model.no_truncation()
        model.no_padding()
        model.encode_special_tokens = True
        self._model = model
        found = model.get_added_tokens_decoder()
        self.added: Mapping[str, AddedToken] = {
            token.content: AddedToken(index, token.special) for index, token in sorted(found.items())
        }
        self.size: int = max(model.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._encoder = _with_markers_unmatched(model, list(found.values()))
        self._is_byte_level, self._is_byte_fallback, self.strips_first_space = _spelling(model.decoder)
        self.has_bytes: bool = self._is_byte_level or self._is_byte_fallback

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy made from the model's own state would match special tokens in text again.
        return (FastPieces, (self._model,))

    def encode(self, text: str) -> list[int]:
        """Ids of the text, in which every marker is plain characters. ValueError for a lone surrogate."""
        try:
            ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        except TypeError as error:  # tokenizers' word for a string with a lone surrogate
            raise ValueError(f"expected text that has a UTF-8 form, got {text[:40]!a} of {len(text)} characters") from error
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, the model's own way."""
        text: str = self._model.decode(list(ids), skip_special_tokens=False)
        return text

    def bytes_of(self, index: int) -> bytes:
        """UTF-8 bytes that the id spells, perhaps part of a character; none for an id without a piece."""
        token = self.token_of(index)
        if token is None:
            return b""
        if self._is_byte_level:
            table = byte_of_letter()
            known = all(letter in table for letter in token)
            return bytes(table[letter] for letter in token) if known else token.encode("utf-8")
        return fallback_bytes(token)

    def id_of(self, token: str) -> int | None:
        """Id of a piece or added token."""
        index: int | None = self._model.token_to_id(token)
        return index

    def token_of(self, index: int) -> str | None:
        """Piece or added token of an id."""
        token: str | None = self._model.id_to_token(index)
        return token

    def identity(self) -> str:
        """All that decides the ids, as text."""
        text: str = self._model.to_str()
        return text

    def files(self) -> dict[str, bytes]:
        """Contents of the model's own files, by name."""
        return {"tokenizer.json": self._model.to_str(pretty=True).encode("utf-8")}


def _with_markers_unmatched(model: tokenizers.Tokenizer, added: list[Any]) -> tokenizers.Tokenizer:
    """A copy that calls markers special, and so reads them as plain text, and nothing else; the model itself where it fits."""
    if all(is_marker(token.content, token.special) == token.special for token in added):
        return model
    # The library keeps a token that was ever special so, whatever is added later: the description itself must say it.
    described = json.loads(model.to_str())
    for token in described["added_tokens"]:
        token["special"] = is_marker(token["content"], token["special"])
    encoder = tokenizers.Tokenizer.from_str(json.dumps(described))
    encoder.encode_special_tokens = True
    return encoder


def _spelling(decoder: Any) -> tuple[bool, bool, bool]:
    """Whether a decoder is byte-level, whether SentencePiece's with byte fallback, and whether it strips the first space."""
    if decoder is None:
        return False, False, False
    if decoder.decode(["ä½", "ł"]) == "你":
        return True, False, False
    said = decoder.decode(["▁a", "▁b", "<0xE4>", "<0xBD>", "<0xA0>"])
    return False, said in (" a b你", "a b你"), said == "a b你"


@functools.cache
def byte_of_letter() -> dict[str, int]:
    """The byte that each letter of the byte-level alphabet stands for.

    Printable bytes of Latin-1 stand for themselves, the others for letters from U+0100 on, in order (GPT-2).
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    table = {letter: ord(letter) for letter in alphabet if ord(letter) < 256}
    others = sorted(set(range(256)) - set(table.values()))
    return table | dict(zip(sorted(letter for letter in alphabet if ord(letter) >= 256), others, strict=True))


def fallback_bytes(piece: str) -> bytes:
    """Bytes of a SentencePiece piece: `<0xE4>` is one byte, in others the low line U+2581 is a space."""
    match = BYTE_PIECE.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else piece.replace("▁", " ").encode("utf-8")
