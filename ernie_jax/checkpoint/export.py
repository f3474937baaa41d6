"""Models written as Hugging Face folders that transformers loads."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from ernie_jax.checkpoint.extra_tensors import ExtraTensors
from ernie_jax.checkpoint.host_blocks import host_block
from ernie_jax.checkpoint.hub_tensors import HubTensor, hub_tensors, natural_order
from ernie_jax.checkpoint.safetensors_writer import FORMATS, Entry, format_of, write_safetensors
from ernie_jax.checkpoint.weight_files import INDEX_FILE, SINGLE_FILE, WeightFiles
from ernie_jax.config import ModelConfig, config_to_hf
from ernie_jax.models import TextModel
from ernie_jax.sharding import variables_by_path

logger = logging.getLogger(__name__)

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B)\s*", re.IGNORECASE)
_WEIGHT_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
_DTYPES = {code: np.dtype(getattr(ml_dtypes, name, name)) for name, code in FORMATS.items()}


def parse_size(size: str | int) -> int:
    """Bytes of `"5GB"` (powers of ten), `"512MiB"` (powers of two) or a number.

    Raises:
      ValueError: neither, or not positive.
    """
    match = _SIZE.fullmatch(str(size)) if isinstance(size, str) else None
    value = int(float(match[1]) * _UNITS[match[2].upper()]) if match else size
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"max_shard_size={size!r}; expected bytes as a positive number, or text such as '5GB' or '512MiB'")
    return value


def save_pretrained(
    model: TextModel, folder: str | os.PathLike[str], *, max_shard_size: str | int = "5GB", dtype: str | None = None
) -> None:
    """Write a model's weights and `config.json` in the published layout.

    One tensor at a time is on the host. Everything is written to `<folder>.partial` beside the target first and moved when it
    is complete, so an interrupted export leaves nothing that looks like a checkpoint; the next one removes the leftover. Other
    files of an existing folder (a tokenizer) stay. With several processes all must call; process 0 writes.

    Args:
      model: any sharding.
      folder: local path; made if need be, an earlier export in it is replaced.
      max_shard_size: most bytes of tensors in a file, unless a single tensor is larger.
      dtype: format of the weights, by default as the model holds them; router gates and biases are always float32.

    Raises:
      ValueError: a size or dtype that is not one, a folder that is a file.
    """
    limit = parse_size(max_shard_size)
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise ValueError(f"cannot export to {target}: it is a file; give a folder")
    source = _Source(model, dtype)
    shards = _pack(source.entries, limit)
    partial = target.with_name(target.name + ".partial")
    writes = jax.process_index() == 0
    if writes:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    names = _file_names(len(shards))
    for name, entries in zip(names, shards, strict=True):
        if writes:
            write_safetensors(partial / name, entries, source.produce)
        else:
            for entry in sorted(entries, key=source.order):
                source.produce(entry)
    if writes:
        _write_json(partial / "generation_config.json", _generation_config(model.config))
        _write_json(partial / "config.json", source.config)
        if len(shards) > 1:
            _write_json(partial / INDEX_FILE, _index_of(names, shards))
        _move(partial, target, last=[*names, "config.json", INDEX_FILE])
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"ernie_jax export {target}")
