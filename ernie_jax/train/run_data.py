"""What a run reads, and how it makes a tokenizer of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ernie_jax.data import HeldoutBatches, HeldoutMultimodalBatches, Tokenizer, TrainIterator
from ernie_jax.data.vision import ImageProcessor, VideoProcessor

# Text that a tokenizer of our own is trained on; more changes few merges and takes longer.
TOKENIZER_CHARACTERS = 8_000_000


@dataclass(frozen=True)
class RunData:
    """What a run reads.

    Attributes:
      tokenizer: of the training text; exported with the model.
      batches: this host's rows of each training batch.
      held_out: this host's rows of the held-out batches, None without held-out files.
      processors: of images and videos, exported too; none for text alone.
    """

    tokenizer: Tokenizer
    batches: TrainIterator
    held_out: HeldoutBatches | HeldoutMultimodalBatches | None
    processors: tuple[ImageProcessor | VideoProcessor, ...] = ()

    def save(self, folder: Path) -> None:
        """Write what a user of the export needs beside the weights."""
        self.tokenizer.save(folder)
        for processor in self.processors:
            processor.save(folder)


def train_once(folder: Path, train: Callable[[Path], object]) -> None:
    """`train` into a folder beside, which becomes `folder` when it is complete; nothing where it exists."""
    if folder.exists():
        return
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    train(partial)
    partial.rename(folder)


def texts_of(path: Path, max_characters: int | None = None) -> Iterator[str]:
    """The texts of a JSONL file's records, or the first of them with about so many characters together."""
    size = 0
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            text: str = json.loads(line)["text"]
            yield text
            size += len(text)
            if max_characters is not None and size >= max_characters:
                return
