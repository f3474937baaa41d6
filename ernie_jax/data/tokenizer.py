"""A tokenizer in a folder: text to ids and back, special tokens that text can never forge, byte-level BPE training."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers
from etils import epath
from tokenizers import decoders, models, pre_tokenizers, trainers

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
_MIN_VOCAB_SIZE = 3 + 256


class Tokenizer:
    """Text to ids and back, over a `tokenizers` model.

    `encode` reads special tokens in the text as plain characters: "</s>" in a document is four characters, never the end.

    Attributes:
      vocab_size: number of ids, special tokens included.
      eos_token_id: id of the end of a document.
      bos_token_id: id of the begin, None where the tokenizer has none.
      pad_token_id: id at padding. Where the tokenizer names none it is the end's: padding is told by position, never by id.
    """

    def __init__(
        self, model: tokenizers.Tokenizer, config: dict[str, Any], special_tokens_map: dict[str, Any] | None = None
    ) -> None:
        """Wraps a `tokenizers` model.

        Args:
          model: the model; truncation, padding and special-token matching inside it are switched off.
          config: contents of `tokenizer_config.json`; names `eos_token` and perhaps `bos_token`, `pad_token`.
          special_tokens_map: contents of `special_tokens_map.json`, asked for names that `config` lacks.

        Raises:
          ValueError: no end token is named, or a named token is not in the vocabulary.
        """
        self._model = model
        self._config = dict(config)
        self._special_tokens_map = dict(special_tokens_map or {})
        model.no_truncation()
        model.no_padding()
        model.encode_special_tokens = True
        self.vocab_size: int = model.get_vocab_size(with_added_tokens=True)
        eos = self._special_id("eos_token")
        if eos is None:
            raise ValueError("the tokenizer names no eos_token; put one in its tokenizer_config.json: documents must end")
        self.eos_token_id: int = eos
        self.bos_token_id: int | None = self._special_id("bos_token")
        pad = self._special_id("pad_token")
        self.pad_token_id: int = eos if pad is None else pad

    def _special_id(self, name: str) -> int | None:
        token = self._config.get(name) or self._special_tokens_map.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if token is None:
            return None
        index = self._model.token_to_id(token)
        if index is None:
            raise ValueError(f"{name} is {token!r}, which is not in the tokenizer's vocabulary of {self.vocab_size} tokens")
        return int(index)

    @classmethod
    def from_folder(cls, path: epath.PathLike) -> Tokenizer:
        """Reads `tokenizer.json`, and `tokenizer_config.json` and `special_tokens_map.json` for the special tokens' names.

        Args:
          path: a folder, local or remote, as this project or `transformers` saves it.

        Raises:
          ValueError: no or no readable `tokenizer.json`, or no end token.
        """
        folder = epath.Path(path)
        file = folder / "tokenizer.json"
        if not file.exists():
            raise ValueError(
                f"no tokenizer.json in {folder}; give a folder saved by train_tokenizer or by transformers' fast tokenizers"
            )
        try:
            model = tokenizers.Tokenizer.from_buffer(file.read_bytes())
        except Exception as error:  # tokenizers raises plain Exception
            raise ValueError(f"{file} is not a tokenizer.json of the tokenizers library: {error}") from error
        try:
            return cls(model, _read_json(folder / "tokenizer_config.json"), _read_json(folder / "special_tokens_map.json"))
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error

    def save(self, folder: epath.PathLike) -> None:
        """Writes the three files `transformers` and `from_folder` read; the folder is made if missing."""
        target = epath.Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        named = {name: self._config[name] for name in _SPECIAL_NAMES if self._config.get(name)}
        (target / "tokenizer.json").write_bytes(self._model.to_str(pretty=True).encode("utf-8"))
        for name, contents in (("tokenizer_config", self._config), ("special_tokens_map", self._special_tokens_map or named)):
            (target / f"{name}.json").write_bytes((json.dumps(contents, indent=2, ensure_ascii=False) + "\n").encode("utf-8"))

    def encode(self, text: str, *, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        """Ids of the text.

        Args:
          text: any text; special tokens in it are plain characters.
          add_bos, add_eos: put the begin or end id around it.

        Raises:
          ValueError: the text holds a lone surrogate (it has no UTF-8 form), the tokenizer has no begin token, or its merges
            spell the begin or end token from plain characters.
        """
        try:
            ids: list[int] = self._model.encode(text, add_special_tokens=False).ids
        except TypeError as error:  # tokenizers' word for a string with a lone surrogate
            raise ValueError(f"expected text that has a UTF-8 form, got {text[:40]!a} of {len(text)} characters") from error
        for forged in (self.bos_token_id, self.eos_token_id):
            if forged is not None and forged in ids:
                raise ValueError(
                    f"the tokenizer's own merges turn plain text into the special id {forged} "
                    f"({self._model.id_to_token(forged)!r}); remove that merge from its tokenizer.json"
                )
        if add_bos:
            if self.bos_token_id is None:
                raise ValueError("add_bos=True, but the tokenizer names no bos_token in its tokenizer_config.json")
            ids = [self.bos_token_id, *ids]
        return [*ids, self.eos_token_id] if add_eos else ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of the ids; special tokens are left out, or spelled with `skip_special=False`."""
        text: str = self._model.decode([int(index) for index in ids], skip_special_tokens=skip_special)
        return text

    @functools.cached_property
    def _fingerprint(self) -> str:
        ids = [self.pad_token_id, self.bos_token_id, self.eos_token_id]
        return hashlib.sha256(json.dumps([self._model.to_str(), ids]).encode("utf-8")).hexdigest()[:16]

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


def train_tokenizer(texts: Iterable[str] | Sequence[str], vocab_size: int, folder: epath.PathLike) -> Tokenizer:
    """Trains byte-level BPE on the texts and saves it: `<unk>` (and padding) 0, `<s>` 1, `</s>` 2, 256 bytes, merges.

    Any text round-trips, because every byte has a token. The same texts give the same tokenizer.

    Args:
      texts: the sample; read once.
      vocab_size: number of ids wanted, at least 259. A sample with fewer merges to learn gives fewer.
      folder: receives `tokenizer.json`, `tokenizer_config.json` and `special_tokens_map.json`.

    Raises:
      ValueError: `vocab_size` below 259, or `texts` is a single string.
    """
    if vocab_size < _MIN_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size is {vocab_size}; byte-level BPE needs at least {_MIN_VOCAB_SIZE}: 3 special tokens and 256 bytes"
        )
    if isinstance(texts, str):
        raise ValueError("texts is one string; give an iterable of documents")
    model = tokenizers.Tokenizer(models.BPE())
    # The split into words also keeps "</", "s" and ">" apart, so no merge can ever spell a special token.
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[UNK, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    trained = Tokenizer(model, _TRAINED_CONFIG)
    trained.save(folder)
    return trained
