"""Documents in files by record index: text, JSONL or Parquet, by globs."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import TypeAlias

import numpy as np
from etils import epath

from ernie_jax.data.parquet import ParquetShard, RowGroupCache
from ernie_jax.data.paths import expand_paths, file_size, names_below_common_folder
from ernie_jax.data.shards import BadRecordError, JsonlShard, OpenFiles, Shard, TextShard

__all__ = ["FORMATS", "BadRecordError", "Paths", "Records", "open_records"]

Paths: TypeAlias = str | epath.Path | Sequence[str | epath.Path]
Opener = Callable[[epath.Path, str, OpenFiles, RowGroupCache], Shard]

FORMATS: dict[str, Opener] = {
    "text": lambda path, field, files, cache: TextShard(path),
    "jsonl": lambda path, field, files, cache: JsonlShard(path, field, files),
    "parquet": lambda path, field, files, cache: ParquetShard(path, field, cache),
}
SUFFIXES = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".py": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}


class Records:
    """The records of several files under one index, file after file.

    `records[i]` is the text of record i, empty for an empty document; a bad one raises BadRecordError, a ValueError that names the
    file and the line (from 1) or row (from 0). Reading is thread-safe and holds no text but the Parquet row groups read last.

    Attributes:
      files: (name, size in bytes) of each file; names are relative to the folder all files are in.
    """

    def __init__(self, shards: Sequence[Shard], files: Sequence[tuple[str, int]], open_files: OpenFiles) -> None:
        self.files = tuple(files)
        self._shards = shards
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(shard) for shard in shards], dtype=np.int64)])
        # Files are closed when the records are dropped, too.
        self._close = weakref.finalize(self, open_files.close)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> str:
        shard, local = self.locate(index)
        return shard.text(local)

    def locate(self, index: int) -> tuple[Shard, int]:
        """The file of a record, and its index there."""
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._shards[shard], index - int(self._starts[shard])

    def close(self) -> None:
        """Closes the files; later reads of JSONL files raise ValueError."""
        self._close()


def _format_of(path: epath.Path, format: str) -> str:
    if format != "auto":
        return format
    suffix = PurePosixPath(str(path)).suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"the format of {path} is not known from its suffix {suffix!r}; set format to one of {', '.join(FORMATS)}")
    return SUFFIXES[suffix]


def open_records(paths: Paths, *, format: str = "auto", text_field: str = "text") -> Records:
    """Opens files for random access by record.

    Args:
      paths: a path or glob, or several; local or any `etils.epath` path.
      format: `text` (one file is one document), `jsonl`, `parquet`, or `auto`: by each file's suffix.
      text_field: field (JSONL) or column (Parquet) with the text.

    Raises:
      ValueError: a pattern matches nothing, the format is not known, a Parquet file lacks the column, or there is no record at all.
    """
    if format != "auto" and format not in FORMATS:
        raise ValueError(f"format is {format!r}; expected auto or one of {', '.join(FORMATS)}")
    found = expand_paths(paths)
    formats = [_format_of(path, format) for path in found]
    open_files, cache = OpenFiles(), RowGroupCache()
    shards = [FORMATS[kind](path, text_field, open_files, cache) for kind, path in zip(formats, found, strict=True)]
    sizes = [file_size(path) for path in found]
    records = Records(shards, list(zip(names_below_common_folder(found), sizes, strict=True)), open_files)
    if not len(records):
        raise ValueError(f"no record in {json.dumps([str(path) for path in found[:5]])}: every file is empty")
    return records
