"""The pieces of a `tokenizer.model`, through the `sentencepiece` library itself, so that ids are its ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from ernie_jax.data.fast_pieces import fallback_bytes
from ernie_jax.data.special_tokens import AddedToken, is_marker

# Classes of generated code, which type checkers cannot see.
_ModelProto: Any = vars(sentencepiece_model_pb2)["ModelProto"]
_Piece: Any = _ModelProto.SentencePiece


class SentencePieces:
    """`Pieces` of a SentencePiece model and the tokens added to it.

    The model's own description is changed in two ways before it is used; the file that is saved is the one that was read.
    No space is put in front of a text (ERNIE's `add_prefix_space` is false), so stretches of text can be encoded apart.
    Markers become control pieces, which SentencePiece never makes from text; single characters that the file calls control
    pieces become ordinary symbols, since published files list the digits there.
    """

    def __init__(self, model: bytes, added: Mapping[str, AddedToken], named: Collection[str] = ()) -> None:
        """Reads a model.

        Args:
          model: contents of `tokenizer.model`.
          added: tokens beside the model's pieces, or the model's own pieces again.
          named: tokens that a configuration names as special; pieces of the model among them are markers.

        Raises:
          ValueError: not a SentencePiece model, or added tokens that do not fit it or each other.
        """
        self._arguments = (model, dict(added), tuple(named))
        proto = _ModelProto()
        try:
            proto.ParseFromString(model)
        except Exception as error:  # protobuf's DecodeError has no public base but Exception
            raise ValueError(f"not a SentencePiece model: {error}") from error
        if not proto.pieces:
            raise ValueError("not a SentencePiece model: it holds no pieces")
        self._ids = {piece.piece: index for index, piece in enumerate(proto.pieces)}
        self._pieces = [piece.piece for piece in proto.pieces]
        self._is_byte = [piece.type == _Piece.BYTE for piece in proto.pieces]
        self.added: Mapping[str, AddedToken] = _merged(proto, self._ids, added, named)
        self._tokens = dict(enumerate(self._pieces)) | {token.index: name for name, token in self.added.items()}
        self._ids |= {name: token.index for name, token in self.added.items()}
        self.size: int = max(self._tokens) + 1
        self.has_bytes = True
        self.strips_first_space = False
        for piece in proto.pieces:
            token = self.added.get(piece.piece)
            if token is None or piece.type == _Piece.UNKNOWN:
                continue
            if is_marker(piece.piece, token.special):
                piece.type = _Piece.CONTROL
            elif piece.type == _Piece.CONTROL:
                piece.type = _Piece.USER_DEFINED
        proto.normalizer_spec.add_dummy_prefix = False
        self._model = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())

    def __reduce__(self) -> tuple[Any, ...]:
        return (SentencePieces, self._arguments)

    def encode(self, text: str) -> list[int]:
        """Ids of the text, in which every marker is plain characters. ValueError for a lone surrogate."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"expected text that has a UTF-8 form, got {text[:40]!a} of {len(text)} characters") from error
        ids: list[int] = self._model.encode(text, out_type=int)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.bytes_of(index) for index in ids).decode("utf-8", errors="replace")

    def bytes_of(self, index: int) -> bytes:
        """UTF-8 bytes that the id spells, perhaps part of a character; none for an id without a piece."""
        token = self._tokens.get(index)
        if token is None:
            return b""
        is_piece = index < len(self._pieces)
        if is_piece and self._is_byte[index]:
            return fallback_bytes(token)
        return token.replace("▁", " ").encode("utf-8") if is_piece else token.encode("utf-8")

    def id_of(self, token: str) -> int | None:
        """Id of a piece or added token."""
        return self._ids.get(token)

    def token_of(self, index: int) -> str | None:
        """Piece or added token of an id."""
        return self._tokens.get(index)

    def identity(self) -> str:
        """All that decides the ids, as text."""
        added = sorted((name, token.index) for name, token in self.added.items())
        return json.dumps([hashlib.sha256(self._arguments[0]).hexdigest(), added])

    def files(self) -> dict[str, bytes]:
        """Contents of the model's own files, by name."""
        model, added, _ = self._arguments
        outside = {name: token.index for name, token in added.items() if token.index >= len(self._pieces)}
        contents = json.dumps(outside, indent=2, ensure_ascii=False) + "\n"
        return {"tokenizer.model": model, "added_tokens.json": contents.encode("utf-8")}


def _merged(proto: Any, ids: Mapping[str, int], added: Mapping[str, AddedToken], named: Collection[str]) -> dict[str, AddedToken]:
    """The model's control, unknown and user-defined pieces, the pieces that are named, and the added tokens, by id."""
    merged = {}
    for index, piece in enumerate(proto.pieces):
        is_control = piece.type in (_Piece.CONTROL, _Piece.UNKNOWN)
        if is_control or piece.type == _Piece.USER_DEFINED or piece.piece in named:
            merged[piece.piece] = AddedToken(index, is_control or piece.piece in named)
    owner = {index: name for name, index in ids.items()}
    for name, token in added.items():
        taken = owner.setdefault(token.index, name)
        if ids.get(name, token.index) != token.index or taken != name:
            raise ValueError(
                f"added token {name!r} has id {token.index}, which does not fit tokenizer.model: "
                f"id {token.index} is {taken!r} and {name!r} is {ids.get(name)}; are the files of one tokenizer?"
            )
        special = token.special or (name in merged and merged[name].special)
        merged[name] = AddedToken(token.index, special or name in named)
    return dict(sorted(merged.items(), key=lambda item: item[1].index))
