"""Models written as Hugging Face folders that transformers loads."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from ernie_jax.checkpoint.hub_source import HubSource
from ernie_jax.checkpoint.safetensors_writer import Entry, file_order, write_safetensors
from ernie_jax.checkpoint.weight_files import INDEX_FILE, SINGLE_FILE
from ernie_jax.config import ModelConfig
from ernie_jax.models import TextModel

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B)\s*", re.IGNORECASE)
_WEIGHT_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
# A run of rows exists about four times on its way to the file; the smallest keeps the number of runs low.
_RUNS_A_FILE, _SMALLEST_RUN, _LARGEST_RUN = 16, 1 << 20, 64 << 20


def parse_size(size: str | int) -> int:
    """Bytes of `"5GB"` (powers of ten), `"512MiB"` (powers of two) or a number.

    Raises:
      ValueError: neither, or not positive.
    """
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    unit = _UNITS.get(match[2].upper()) if match else None
    value = int(float(match[1]) * unit) if match and unit else size
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"max_shard_size={size!r}; expected bytes as a positive number, or text such as '5GB' or '512MiB'")
    return value


def save_pretrained(
    model: TextModel,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: str | int = "5GB",
    dtype: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a model's weights and `config.json` in the published layout.

    A few rows of one tensor are on the host at a time. Everything is written to `<folder>.partial` beside the target first and
    moved when it is complete, so an interrupted export leaves nothing that looks like a checkpoint; the next one removes the
    leftover. Other files of an existing folder (a tokenizer) stay. With several processes all must call; process 0 writes.

    Args:
      model: any sharding.
      folder: local path; made if need be, an earlier export in it is replaced.
      max_shard_size: most bytes of tensors in a file, unless a single tensor is larger.
      dtype: format of the weights, by default as the model holds them; router gates and biases are always float32.
      progress: called with the bytes that are written and the bytes there will be, after each tensor; in process 0 only.

    Raises:
      ValueError: a size or dtype that is not one, a folder that is a file.
    """
    limit = parse_size(max_shard_size)
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise ValueError(f"cannot export to {target}: it is a file; give a folder")
    source = HubSource(model, dtype)
    shards = pack(source.entries, limit)
    source.budget = min(max(max(map(_total, shards)) // _RUNS_A_FILE, _SMALLEST_RUN), _LARGEST_RUN)
    count = len(shards)
    names = [SINGLE_FILE] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    try:
        if jax.process_index() == 0:
            _write(target, source, dict(zip(names, shards, strict=True)), model.config, progress or (lambda done, total: None))
        else:
            _attend(source, shards)
    finally:
        source.close()
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"ernie_jax export {target}")


def pack(entries: Sequence[Entry], limit: int) -> list[list[Entry]]:
    """Tensors into files in their order, each file at most `limit` bytes unless one tensor alone is more."""
    shards: list[list[Entry]] = [[]]
    for entry in entries:
        if shards[-1] and _total(shards[-1]) + entry.nbytes > limit:
            shards.append([])
        shards[-1].append(entry)
    return shards


def _total(entries: Sequence[Entry]) -> int:
    return sum(entry.nbytes for entry in entries)


def _write(
    target: Path,
    source: HubSource,
    shards: dict[str, list[Entry]],
    config: ModelConfig,
    progress: Callable[[int, int], None],
) -> None:
    partial = target.absolute().with_name(target.absolute().name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    done, total = 0, sum(map(_total, shards.values()))

    def produce(entry: Entry) -> Iterator[np.ndarray]:
        nonlocal done
        yield from source.produce(entry)
        done += entry.nbytes
        progress(done, total)

    for name, entries in shards.items():
        write_safetensors(partial / name, entries, produce)
    _write_json(partial / "generation_config.json", generation_config(config))
    _write_json(partial / "config.json", source.config)
    if len(shards) > 1:
        _write_json(partial / INDEX_FILE, _index(shards))
    _move(partial, target)


def _attend(source: HubSource, shards: Sequence[Sequence[Entry]]) -> None:
    """Take part in gathering every tensor without writing it."""
    for entries in shards:
        for entry in file_order(entries):
            for _ in source.produce(entry):
                pass


def _index(shards: dict[str, list[Entry]]) -> dict[str, Any]:
    total = sum(map(_total, shards.values()))
    return {
        "metadata": {"total_size": total},
        "weight_map": {entry.name: file for file, entries in shards.items() for entry in entries},
    }


def generation_config(config: ModelConfig) -> dict[str, Any]:
    """The content of `generation_config.json`: the special tokens."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {"_from_model_config": True} | {name: getattr(config, name) for name in names}


def _write_json(path: Path, values: dict[str, Any]) -> None:
    with path.open("w") as file:
        json.dump(values, file, indent=2, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def _move(partial: Path, target: Path) -> None:
    """Put a complete export in place: at once where there is nothing, else file by file with the one that is read first last."""
    if not target.exists():
        partial.rename(target)
        return
    # Without its index or its single file an old export is no longer loadable, and so never mixed with the new one.
    for name in (INDEX_FILE, SINGLE_FILE):
        (target / name).unlink(missing_ok=True)
    for old in target.iterdir():
        if _WEIGHT_FILE.fullmatch(old.name):
            old.unlink()
    last = {SINGLE_FILE: 1, INDEX_FILE: 2}
    for file in sorted(partial.iterdir(), key=lambda path: (last.get(path.name, 0), path.name)):
        file.replace(target / file.name)
    partial.rmdir()
