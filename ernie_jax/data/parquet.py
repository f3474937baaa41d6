"""Parquet files whose rows are read by index, one column of one row group at a time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from etils import epath

from ernie_jax.data.shards import BadRecordError

_CACHE_BYTES = 256 << 20


class RowGroupCache:
    """Columns of row groups, the least recently used dropped first, within a number of bytes (one is always kept)."""

    def __init__(self, limit: int = _CACHE_BYTES) -> None:
        self._limit = limit
        self._size = 0
        self._columns: OrderedDict[tuple[str, int], Any] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[str, int], read: Callable[[], Any]) -> Any:
        """The column under this key, read when it is not there."""
        with self._lock:
            if key in self._columns:
                self._columns.move_to_end(key)
                return self._columns[key]
            # Read under the lock: two threads that want one row group must not both decode it.
            column = self._columns[key] = read()
            self._size += column.nbytes
            while self._size > self._limit and len(self._columns) > 1:
                self._size -= self._columns.popitem(last=False)[1].nbytes
            return column


class ParquetShard:
    """A Parquet file; record n is row n, counted from 0."""

    def __init__(self, path: epath.Path, text_field: str, cache: RowGroupCache) -> None:
        """Reads the file's footer.

        Args:
          path: the file.
          text_field: column of the text.
          cache: holds the row groups read last.

        Raises:
          ValueError: not a Parquet file, no such column, or a column that is not of strings.
        """
        self._path = path
        self._field = text_field
        self._cache = cache
        try:
            with path.open("rb") as file, pq.ParquetFile(file) as parquet:
                schema = parquet.schema_arrow
                rows = [parquet.metadata.row_group(i).num_rows for i in range(parquet.metadata.num_row_groups)]
        except pa.ArrowException as error:
            raise ValueError(f"{path} is not a readable Parquet file: {error}") from error
        if text_field not in schema.names:
            raise ValueError(f"{path} has no column {text_field!r}; its columns are {schema.names}")
        kind = schema.field(text_field).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
            raise ValueError(f"{path}: column {text_field!r} holds {kind}, expected strings")
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(rows, dtype=np.int64)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def text(self, index: int) -> str:
        """The column's string in row `index`."""
        group = int(np.searchsorted(self._starts, index, side="right")) - 1
        column = self._cache.get((str(self._path), group), lambda: self._read(group))
        try:
            text = column[index - int(self._starts[group])].as_py()
        except UnicodeDecodeError as error:
            raise BadRecordError(f"{self._path}, row {index}: not UTF-8 ({error.reason} at byte {error.start})") from error
        if text is None:
            raise BadRecordError(f"{self._path}, row {index}: column {self._field!r} is null, expected a string")
        return str(text)

    def _read(self, group: int) -> Any:
        with self._path.open("rb") as file, pq.ParquetFile(file) as parquet:
            return parquet.read_row_group(group, columns=[self._field]).column(0)
