"""Where the tokens and images of a run come from."""

from __future__ import annotations

from dataclasses import dataclass

from ernie_jax.config.bounds import at_least
from ernie_jax.config.compute import one_of

# Kinds whose files the run makes itself, tokenizer included.
MADE_KINDS = ("standard_library", "digits")
DATA_KINDS = ("files", "multimodal", *MADE_KINDS)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from.

    Attributes:
      kind: `files` reads the texts of `paths`; `standard_library` makes a corpus of the running Python's own source text;
        `multimodal` reads conversations with images and videos, for a vision-language model; `digits` makes such conversations
        from scikit-learn's handwritten digits, with the standard library's source text beside them.
      paths, eval_paths: globs of training and held-out files (text, JSONL, Parquet; of conversations JSONL).
      format: `auto` by suffix, or `text`, `jsonl`, `parquet`.
      text_field: field or column with the text.
      tokenizer: folder with a `tokenizer.json`; None trains one on the corpus (kinds `standard_library` and `digits`).
      packing: `greedy` fills rows with several documents, `none` gives each document its own rows.
      on_bad_record: `error`, or `skip` and count.
      shuffle: permute the records anew each epoch.
      max_bytes: most text taken from the standard library.
      prefetch: batches prepared ahead.

    Of the kinds `multimodal` and `digits` alone; `paths` may then be empty:
      text_paths: globs of files of texts, mixed in.
      text_weight: share of the documents that come from `text_paths`, between 0 and 1, where both are given.
      train_on: `answers` trains the assistant's words of a conversation, `all` every token but those of images and videos.
      template: `auto` takes the chat template in the tokenizer's folder, else the built-in `vl`; or the name of a built-in one.
      max_patches: patches of a device, the same for every batch, which spares compilations and bounds memory; what goes beyond
        waits for the next batch, or is a bad record. None takes the least of a few sizes that holds each batch.
      min_pixels, max_pixels: bounds of an image's size after resizing; None takes those of the processor in the tokenizer's folder.
    """

    kind: str = "files"
    paths: tuple[str, ...] = ()
    eval_paths: tuple[str, ...] = ()
    format: str = "auto"
    text_field: str = "text"
    tokenizer: str | None = None
    packing: str = "greedy"
    on_bad_record: str = "error"
    shuffle: bool = True
    max_bytes: int = 24_000_000
    prefetch: int = 2
    text_paths: tuple[str, ...] = ()
    text_weight: float = 0.5
    train_on: str = "answers"
    template: str = "auto"
    max_patches: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None

    def __post_init__(self) -> None:
        one_of("config.data", "kind", self.kind, DATA_KINDS)
        one_of("config.data", "format", self.format, ("auto", "text", "jsonl", "parquet"))
        one_of("config.data", "packing", self.packing, ("greedy", "none"))
        one_of("config.data", "on_bad_record", self.on_bad_record, ("error", "skip"))
        at_least("config.data", 1, max_bytes=self.max_bytes)
        one_of("config.data", "train_on", self.train_on, ("answers", "all"))
        one_of("config.data", "template", self.template, ("auto", "text", "vl", "thinking", "vl-thinking"))
        at_least("config.data", 0, prefetch=self.prefetch)
        at_least("config.data", 1, max_patches=self.max_patches, min_pixels=self.min_pixels, max_pixels=self.max_pixels)
        if not 0 < self.text_weight < 1:
            raise ValueError(f"config.data.text_weight={self.text_weight}; expected a share between 0 and 1, neither included")
        if self.kind == "files" and not self.paths:
            raise ValueError("config.data.paths is empty; give globs of the training files, or config.data.kind='standard_library'")
        if self.kind == "multimodal" and not (self.paths or self.text_paths):
            raise ValueError("config.data.paths and config.data.text_paths are empty; give globs of training files in one of them")
        if self.kind != "multimodal" and self.text_paths:
            raise ValueError("config.data.text_paths is for config.data.kind='multimodal'; give the files in config.data.paths")
        if self.kind not in MADE_KINDS and self.tokenizer is None:
            raise ValueError("config.data.tokenizer is not set; give a folder with a tokenizer.json")
