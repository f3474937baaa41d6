"""A tokenizer in a folder: text to ids and back, special tokens that text can never forge, byte-level BPE training."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from etils import epath
from tokenizers import decoders, models, pre_tokenizers, trainers

from ernie_jax.data.fast_pieces import FastPieces, Pieces
from ernie_jax.data.sentence_pieces import SentencePieces
from ernie_jax.data.special_tokens import AddedToken, is_marker, named_tokens, near_names, pattern_of, split_at, token_text

UNK, BOS, EOS = "<unk>", "<s>", "</s>"
# ERNIE pads with <unk>, id 0.
_TRAINED_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": UNK,
    "pad_token": UNK,
    "bos_token": BOS,
    "eos_token": EOS,
    "add_bos_token": False,
    "add_eos_token": False,
    "add_prefix_space": False,
    "clean_up_tokenization_spaces": False,
}
_SPECIAL_NAMES = ("unk_token", "pad_token", "bos_token", "eos_token")
_LISTED = "additional_special_tokens"
_MIN_VOCAB_SIZE = 3 + 256


class Tokenizer:
    """Text to ids and back, over a `tokenizers` model or a SentencePiece model.

    `encode` reads special tokens in the text as plain characters: "</s>" in a document is four characters, never the end.
    The same holds for every added token that is spelled as a marker, such as `<|LOC_1|>`, special by its file or not.

    Attributes:
      vocab_size: one more than the largest id, special tokens included.
      eos_token_id: id of the end of a document.
      bos_token_id: id of the begin, None where the tokenizer has none.
      pad_token_id: id at padding. Where the tokenizer names none it is the end's: padding is told by position, never by id.
      special_tokens: ids of the markers, by name; none of them ever comes out of plain text.
      strips_first_space: whether `decode` drops a space at the very begin of a text, because `encode` put it there.
      chat_template: contents of `chat_template.jinja`, None where the folder has none.
    """

    def __init__(
        self,
        model: tokenizers.Tokenizer | Pieces,
        config: dict[str, Any],
        special_tokens_map: dict[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> None:
        """Wraps a model.

        Args:
          model: a `tokenizers` model (truncation, padding and special-token matching inside it are switched off) or pieces.
          config: contents of `tokenizer_config.json`; names `eos_token` and perhaps `bos_token`, `pad_token`.
          special_tokens_map: contents of `special_tokens_map.json`, asked for names that `config` lacks.
          chat_template: contents of `chat_template.jinja`, kept and saved.

        Raises:
          ValueError: no end token is named, or a named token is not in the vocabulary.
        """
        self._pieces: Pieces = FastPieces(model) if isinstance(model, tokenizers.Tokenizer) else model
        self._config = dict(config)
        self._special_tokens_map = dict(special_tokens_map or {})
        self.chat_template = chat_template
        self.vocab_size: int = self._pieces.size
        self.strips_first_space: bool = self._pieces.strips_first_space
        eos = self._special_id("eos_token")
        if eos is None:
            raise ValueError("the tokenizer names no eos_token; put one in its tokenizer_config.json: documents must end")
        self.eos_token_id: int = eos
        self.bos_token_id: int | None = self._special_id("bos_token")
        pad = self._special_id("pad_token")
        self.pad_token_id: int = eos if pad is None else pad
        named = {
            name: index
            for name in named_tokens(self._config, self._special_tokens_map)
            if (index := self._pieces.id_of(name)) is not None
        }
        added = {name: token for name, token in self._pieces.added.items() if is_marker(name, token.special)}
        markers = named | {name: token.index for name, token in added.items()}
        self.special_tokens: Mapping[str, int] = dict(sorted(markers.items(), key=lambda item: item[1]))
        self._skipped = frozenset(named.values()) | {token.index for token in added.values() if token.special}
        # Text with a character that the vocabulary lacks does become the unknown token, and rightly.
        self._unforgeable = frozenset(self.special_tokens.values()) - {self._special_id("unk_token")}
        self._patterns: dict[frozenset[str], re.Pattern[str] | None] = {}
        self._bytes: dict[int, bytes] = {}

    def _special_id(self, name: str) -> int | None:
        token = token_text(self._config.get(name) or self._special_tokens_map.get(name))
        if token is None:
            return None
        index = self._pieces.id_of(token)
        if index is None:
            raise ValueError(f"{name} is {token!r}, which is not in the tokenizer's vocabulary of {self.vocab_size} tokens")
        return index

    @classmethod
    def from_folder(cls, path: epath.PathLike) -> Tokenizer:
        """Reads `tokenizer.json`, or where there is none `tokenizer.model` (SentencePiece) and its added tokens.

        `tokenizer_config.json` and `special_tokens_map.json` give the special tokens' names. The tokens added to a
        `tokenizer.model` are those of `added_tokens.json` and of `added_tokens_decoder` in `tokenizer_config.json`.

        Args:
          path: a folder, local or remote, as published, or as this project or `transformers` saves it.

        Raises:
          ValueError: neither file, an unreadable one, added tokens that do not fit, or no end token.
        """
        folder = epath.Path(path)
        config, special_tokens_map = _read_json(folder / "tokenizer_config.json"), _read_json(folder / "special_tokens_map.json")
        template = folder / "chat_template.jinja"
        chat_template = template.read_bytes().decode("utf-8") if template.exists() else None
        try:
            return cls(_read_pieces(folder, config, special_tokens_map), config, special_tokens_map, chat_template)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error

    def save(self, folder: epath.PathLike) -> None:
        """Writes the files `transformers` and `from_folder` read; the folder is made if missing.

        A tokenizer of a `tokenizer.model` is saved as that same file, not converted.
        """
        target = epath.Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        named = {name: self._config[name] for name in (*_SPECIAL_NAMES, _LISTED) if self._config.get(name)}
        files = self._pieces.files()
        for name, contents in (("tokenizer_config", self._config), ("special_tokens_map", self._special_tokens_map or named)):
            files[f"{name}.json"] = (json.dumps(contents, indent=2, ensure_ascii=False) + "\n").encode("utf-8")
        if self.chat_template is not None:
            files["chat_template.jinja"] = self.chat_template.encode("utf-8")
        for name, data in files.items():
            (target / name).write_bytes(data)

    def encode(
        self, text: str, *, add_bos: bool = False, add_eos: bool = False, allow_special: bool | Collection[str] = False
    ) -> list[int]:
        """Ids of the text.

        Args:
          text: any text.
          add_bos, add_eos: put the begin or end id around it.
          allow_special: False reads special tokens in the text as plain characters; True makes all of them their ids, a
            collection of names those only. The longest name wins where several begin at one place.

        Raises:
          ValueError: the text holds a lone surrogate (it has no UTF-8 form), the tokenizer has no begin token, a name in
            `allow_special` is no special token, or the tokenizer's merges spell a special token from plain characters.
        """
        ids: list[int] = []
        for part in self.split_special(text, allow_special):
            if isinstance(part, int):
                ids.append(part)
                continue
            plain = self._pieces.encode(part)
            if not self._unforgeable.isdisjoint(plain):
                forged = next(index for index in plain if index in self._unforgeable)
                raise ValueError(
                    f"the tokenizer's own merges turn plain text into the special id {forged} "
                    f"({self._pieces.token_of(forged)!r}); remove that merge from its tokenizer.json"
                )
            ids += plain
        if add_bos:
            if self.bos_token_id is None:
                raise ValueError("add_bos=True, but the tokenizer names no bos_token in its tokenizer_config.json")
            ids = [self.bos_token_id, *ids]
        return [*ids, self.eos_token_id] if add_eos else ids

    def split_special(self, text: str, allow_special: bool | Collection[str]) -> list[str | int]:
        """The text cut at the special tokens that `allow_special` (see `encode`) names: plain stretches, and ids.

        Raises:
          ValueError: a name in `allow_special` is no special token.
        """
        if not allow_special:
            return [text] if text else []
        if isinstance(allow_special, str):
            raise ValueError(f"allow_special is one string, {allow_special!r}; give a collection of names, or True for all")
        names = frozenset(self.special_tokens if allow_special is True else allow_special)
        if names not in self._patterns:
            for name in names - self.special_tokens.keys():
                near = near_names(name, self.special_tokens)
                raise ValueError(f"allow_special names {name!r}, which is no special token of this tokenizer{near}")
            self._patterns[names] = pattern_of(names)
        return split_at(text, self._patterns[names], self.special_tokens)

    def token_id(self, name: str) -> int:
        """Id of a token, special or not, by its name.

        Raises:
          ValueError: no such token; says the special tokens most like it.
        """
        index = self._pieces.id_of(name)
        if index is None:
            raise ValueError(f"no token {name!r} in a vocabulary of {self.vocab_size}{near_names(name, self.special_tokens)}")
        return index

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of the ids; special tokens are left out, or spelled with `skip_special=False`.

        Bytes that are no UTF-8 become U+FFFD, one for each stretch that no character can begin with. An id that has no token
        (an embedding may have more rows) spells nothing.
        """
        numbers = [int(index) for index in ids]
        if not self._pieces.has_bytes:
            return self._pieces.decode([index for index in numbers if not (skip_special and index in self._skipped)])
        text = b"".join(self.token_bytes(index, skip_special) for index in numbers).decode("utf-8", errors="replace")
        return text[1:] if self.strips_first_space and text.startswith(" ") else text

    def token_bytes(self, index: int, skip_special: bool = True) -> bytes:
        """UTF-8 bytes that one id adds to a text, perhaps part of a character; none for a special token that is skipped.

        Raises:
          ValueError: as `require_bytes`.
        """
        index = int(index)
        if skip_special and index in self._skipped:
            return b""
        if index not in self._bytes:
            self.require_bytes()
            self._bytes[index] = self._pieces.bytes_of(index)
        return self._bytes[index]

    def require_bytes(self) -> None:
        """Refuses a tokenizer whose tokens have no bytes of their own, so that only whole texts can be decoded.

        Raises:
          ValueError: the tokenizer is neither byte-level nor SentencePiece with byte fallback.
        """
        if not self._pieces.has_bytes:
            raise ValueError(
                "this tokenizer's decoder is neither byte-level nor SentencePiece with byte fallback, so the text of one token "
                "depends on its neighbours; decode whole answers instead"
            )

    @functools.cached_property
    def _fingerprint(self) -> str:
        ids = [self.pad_token_id, self.bos_token_id, self.eos_token_id]
        return hashlib.sha256(json.dumps([self._pieces.identity(), ids]).encode("utf-8")).hexdigest()[:16]

    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits that differ where the model or the special ids differ."""
        return self._fingerprint


def _read_json(file: epath.Path) -> dict[str, Any]:
    """Contents of a JSON object file, empty where there is none."""
    if not file.exists():
        return {}
    contents = json.loads(file.read_bytes())
    if not isinstance(contents, dict):
        raise ValueError(f"{file.name} holds a {type(contents).__name__}, expected a JSON object")
    return contents


def _read_pieces(folder: epath.Path, config: dict[str, Any], special_tokens_map: dict[str, Any]) -> Pieces:
    fast, sentence = folder / "tokenizer.json", folder / "tokenizer.model"
    if fast.exists():
        try:
            return FastPieces(tokenizers.Tokenizer.from_buffer(fast.read_bytes()))
        except Exception as error:  # tokenizers raises plain Exception
            raise ValueError(f"{fast} is not a tokenizer.json of the tokenizers library: {error}") from error
    if not sentence.exists():
        raise ValueError(
            f"no tokenizer.json in {folder} and no tokenizer.model; give a published tokenizer's folder, or one saved by "
            "train_tokenizer or by transformers"
        )
    if config.get("add_prefix_space"):
        raise ValueError("add_prefix_space is true; with a tokenizer.model only false, as in ERNIE's tokenizers, is known")
    named = named_tokens(config, special_tokens_map)
    added = {name: AddedToken(index, name in named) for name, index in _read_json(folder / "added_tokens.json").items()}
    for index, token in (config.get("added_tokens_decoder") or {}).items():
        name = token_text(token)
        if name is None or (name in added and added[name].index != int(index)):
            raise ValueError(f"added_tokens_decoder gives id {index} to {token!r}; added_tokens.json does not agree")
        added[name] = AddedToken(int(index), bool(token.get("special")) or name in named)
    return SentencePieces(sentence.read_bytes(), added, named)


def train_tokenizer(
    texts: Iterable[str] | Sequence[str], vocab_size: int, folder: epath.PathLike, special_tokens: Sequence[str] = ()
) -> Tokenizer:
    """Trains byte-level BPE on the texts and saves it: `<unk>` (and padding) 0, `<s>` 1, `</s>` 2, 256 bytes, merges.

    Any text round-trips, because every byte has a token. The same texts give the same tokenizer.

    Args:
      texts: the sample; read once.
      vocab_size: number of ids wanted, at least 259 and one for each of `special_tokens`. A sample with fewer merges to learn
        gives fewer.
      folder: receives `tokenizer.json`, `tokenizer_config.json` and `special_tokens_map.json`.
      special_tokens: more special tokens, such as the markers of a chat; their ids are 3, 4, ... in this order.

    Raises:
      ValueError: `vocab_size` too small, `texts` is a single string, or special tokens that are too short (one character is
        text), given twice, or that merges of the sample spell.
    """
    if isinstance(special_tokens, str):
        raise ValueError(f"special_tokens is one string, {special_tokens!r}; give a sequence of tokens")
    special = [UNK, BOS, EOS, *special_tokens]
    if len(set(special)) < len(special) or min(map(len, special)) < 2:
        raise ValueError(f"special_tokens must differ and have at least two characters each, got {list(special_tokens)}")
    if vocab_size < _MIN_VOCAB_SIZE + len(special_tokens):
        raise ValueError(
            f"vocab_size is {vocab_size}; byte-level BPE needs at least {_MIN_VOCAB_SIZE + len(special_tokens)}: "
            f"{len(special)} special tokens and 256 bytes"
        )
    if isinstance(texts, str):
        raise ValueError("texts is one string; give an iterable of documents")
    model = tokenizers.Tokenizer(models.BPE())
    # The split into words also keeps "</", "s" and ">" apart, so no merge can ever spell a special token.
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    listed = {_LISTED: list(special_tokens)} if special_tokens else {}
    trained = Tokenizer(model, _TRAINED_CONFIG | listed)
    for token in special_tokens:
        trained.encode(token)
    trained.save(folder)
    return trained
