"""The data of a run: tokenizer, this host's training batches, held-out batches. B rows of a global batch, T tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from ernie_jax.config.run import RunConfig
from ernie_jax.data import (
    Tokenizer,
    heldout_batches,
    make_pipeline,
    standard_library_corpus,
    train_tokenizer,
)
from ernie_jax.sharding import Layout
from ernie_jax.train.multimodal import check_vocabulary, made_digits, open_multimodal
from ernie_jax.train.records import Record
from ernie_jax.train.run_data import TOKENIZER_CHARACTERS, RunData, texts_of, train_once


def open_data(run: RunConfig, workdir: Path, layout: Layout) -> RunData:
    """Find (or, for the standard library, make) the files and the tokenizer of a run.

    Args:
      run: the configuration.
      workdir: the run's folder, for files that are made.
      layout: splits the rows, and the images of a vision-language model.

    Raises:
      ValueError: files or tokenizer that are missing, a tokenizer with more ids than the model has embeddings, data of a kind
        that is not the model's.
    """
    _check_kind(run)
    if run.data.kind == "digits":
        run = dataclasses.replace(run, data=made_digits(run, workdir))
    if run.data.kind == "multimodal":
        return open_multimodal(run, layout)
    paths, eval_paths, tokenizer = _standard_library(run, workdir) if run.data.kind == "standard_library" else _files(run)
    check_vocabulary(tokenizer, run)
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


def image_balance(batch: Mapping[str, np.ndarray]) -> Record:
    """Most patches of a device over the mean, as this host's images are placed and as a naive split would place them."""
    names = {"imbalance": "image_imbalance", "naive_imbalance": "image_imbalance_naive"}
    return {name: float(batch[key]) for key, name in names.items() if key in batch}


def _check_kind(run: RunConfig) -> None:
    """ValueError for data that does not give the arrays the model takes."""
    multimodal = run.data.kind in ("multimodal", "digits")
    if multimodal and run.model.vision is None:
        raise ValueError(f"config.data.kind={run.data.kind!r} is for a vision-language model; this one has no config.model.vision")
    if not multimodal and run.model.vision is not None:
        raise ValueError(
            f"config.data.kind={run.data.kind!r} gives text alone, the model is a vision-language one; use "
            "config.data.kind='multimodal', with config.data.text_paths for text files (config.data.paths may then be empty)"
        )


def _files(run: RunConfig) -> tuple[list[str], list[str], Tokenizer]:
    assert run.data.tokenizer is not None
    return list(run.data.paths), list(run.data.eval_paths), Tokenizer.from_folder(run.data.tokenizer)


def _standard_library(run: RunConfig, workdir: Path) -> tuple[list[str], list[str], Tokenizer]:
    """The standard library's source text, with a tokenizer trained on it unless one is given; both kept in the run's folder."""
    folder = workdir / "tokenizer"
    # One process makes the files, in the folder that all see.
    if jax.process_index() == 0:
        corpus = standard_library_corpus(workdir / "corpus", max_bytes=run.data.max_bytes)
        if run.data.tokenizer is None:
            train_once(
                folder,
                lambda partial: train_tokenizer(texts_of(corpus.train_path, TOKENIZER_CHARACTERS), run.model.vocab_size, partial),
            )
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("ernie_jax corpus")
        corpus = standard_library_corpus(workdir / "corpus", max_bytes=run.data.max_bytes)
    tokenizer = Tokenizer.from_folder(run.data.tokenizer or folder)
    return [str(corpus.train_path)], [str(corpus.heldout_path)], tokenizer
