"""The data of a run: tokenizer, this host's training batches, held-out batches. B rows of a global batch, T tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

from ernie_jax.config.run import RunConfig
from ernie_jax.data import (
    HeldoutBatches,
    Tokenizer,
    TrainIterator,
    heldout_batches,
    make_pipeline,
    standard_library_corpus,
    train_tokenizer,
)

# Text that a tokenizer of our own is trained on; more changes few merges and takes longer.
_TOKENIZER_BYTES = 8_000_000


@dataclass(frozen=True)
class RunData:
    """What a run reads.

    Attributes:
      tokenizer: of the training text; exported with the model.
      batches: this host's rows of each training batch.
      held_out: this host's rows of the held-out batches, None without held-out files.
    """

    tokenizer: Tokenizer
    batches: TrainIterator
    held_out: HeldoutBatches | None


def open_data(run: RunConfig, workdir: Path) -> RunData:
    """Find (or, for the standard library, make) the files and the tokenizer of a run.

    Raises:
      ValueError: files or tokenizer that are missing, or a tokenizer with more ids than the model has embeddings.
    """
    paths, eval_paths, tokenizer = _standard_library(run, workdir) if run.data.kind == "standard_library" else _files(run)
    if tokenizer.vocab_size > run.model.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model {run.model.vocab_size} embeddings; "
            "raise config.model.vocab_size or use the model's own tokenizer (config.data.tokenizer)"
        )
    hosts: dict[str, Any] = {"process_index": jax.process_index(), "process_count": jax.process_count()}
    options: dict[str, Any] = {
        "seq_len": run.seq_len,
        "format": run.data.format,
        "text_field": run.data.text_field,
        "packing": run.data.packing,
        "on_bad_record": run.data.on_bad_record,
    }
    batches = make_pipeline(
        paths=paths,
        tokenizer=tokenizer,
        batch_size=run.batch_size,
        seed=run.seed,
        shuffle=run.data.shuffle,
        prefetch=run.data.prefetch,
        **options,
        **hosts,
    )
    held_out = None
    if eval_paths:
        # A held-out batch is as large as a microbatch: what fits in training fits here.
        held_out = heldout_batches(
            paths=eval_paths,
            tokenizer=tokenizer,
            batch_size=run.batch_size // run.accumulate,
            max_batches=run.eval.batches,
            **options,
            **hosts,
        )
    return RunData(tokenizer, batches, held_out)


def _files(run: RunConfig) -> tuple[list[str], list[str], Tokenizer]:
    assert run.data.tokenizer is not None
    return list(run.data.paths), list(run.data.eval_paths), Tokenizer.from_folder(run.data.tokenizer)


def _standard_library(run: RunConfig, workdir: Path) -> tuple[list[str], list[str], Tokenizer]:
    """The standard library's source text, with a tokenizer trained on it unless one is given; both kept in the run's folder."""
    folder = workdir / "tokenizer"
    # One process makes the files, in the folder that all see.
    if jax.process_index() == 0:
        corpus = standard_library_corpus(workdir / "corpus", max_bytes=run.data.max_bytes)
        if run.data.tokenizer is None and not folder.exists():
            partial = workdir / "tokenizer.partial"
            shutil.rmtree(partial, ignore_errors=True)
            train_tokenizer(_texts(corpus.train_path), run.model.vocab_size, partial)
            partial.rename(folder)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("ernie_jax corpus")
        corpus = standard_library_corpus(workdir / "corpus", max_bytes=run.data.max_bytes)
    tokenizer = Tokenizer.from_folder(run.data.tokenizer or folder)
    return [str(corpus.train_path)], [str(corpus.heldout_path)], tokenizer


def _texts(path: Path) -> Iterator[str]:
    size = 0
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            text: str = json.loads(line)["text"]
            yield text
            size += len(text)
            if size >= _TOKENIZER_BYTES:
                return
