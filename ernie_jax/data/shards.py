"""Files whose records are read by index, without holding their text: one document a file, or one a line."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import IO, Any, Protocol

import numpy as np
from etils import epath

_SCAN_BYTES = 8 << 20
_OPEN_FILES = 64
_NEWLINE = 10


class BadRecordError(ValueError):
    """A record that cannot be used; the message names the file and the line or row."""


class Shard(Protocol):
    """One file of records. `text` may be called from several threads."""

    def __len__(self) -> int:
        """Number of records."""
        ...

    def text(self, index: int) -> str:
        """The record's text; empty where there is nothing to train on. Raises BadRecordError."""
        ...


class OpenFiles:
    """Files kept open between reads, the least recently used closed first, so that a thousand shards do not exhaust descriptors."""

    def __init__(self, limit: int = _OPEN_FILES) -> None:
        self._limit = limit
        self._open: OrderedDict[str, tuple[IO[bytes], threading.Lock]] = OrderedDict()
        self._lock = threading.Lock()
        self._closed = False

    def __len__(self) -> int:
        return len(self._open)

    def read(self, path: epath.Path, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of the file."""
        while True:
            file, lock = self._file(path)
            with lock:
                # Another thread may have closed it between the two locks.
                if not file.closed:
                    file.seek(start)
                    return file.read(stop - start)

    def _file(self, path: epath.Path) -> tuple[IO[bytes], threading.Lock]:
        with self._lock:
            if self._closed:
                raise ValueError(f"{path} is read after its records were closed")
            key = str(path)
            if key not in self._open:
                self._open[key] = (path.open("rb"), threading.Lock())
                if len(self._open) > self._limit:
                    _close(*self._open.popitem(last=False)[1])
            self._open.move_to_end(key)
            return self._open[key]

    def close(self) -> None:
        """Closes all files; later reads raise ValueError."""
        with self._lock:
            self._closed = True
            while self._open:
                _close(*self._open.popitem()[1])


def _close(file: IO[bytes], lock: threading.Lock) -> None:
    with lock:
        file.close()


class TextShard:
    """A text file that is one document."""

    def __init__(self, path: epath.Path) -> None:
        self._path = path

    def __len__(self) -> int:
        return 1

    def text(self, index: int) -> str:
        """The whole file, without a byte-order mark."""
        raw = self._path.read_bytes()
        try:
            return raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            raise BadRecordError(f"{self._path}, line {line}: not UTF-8 ({error.reason} at byte {error.start})") from error


class JsonlShard:
    """A file with one JSON object a line; line n is record n - 1, blank ones included, as records without text."""

    def __init__(self, path: epath.Path, text_field: str, files: OpenFiles) -> None:
        """Reads the file once to find where its lines begin.

        Args:
          path: the file.
          text_field: key of the text.
          files: reads it later.
        """
        self.path = path
        self.text_field = text_field
        self._files = files
        self._bounds = _line_bounds(path)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def where(self, index: int) -> str:
        """Names file and line in messages."""
        return f"{self.path}, line {index + 1}"

    def record(self, index: int) -> dict[str, Any] | None:
        """The object of line `index + 1`, None for a blank line. Raises BadRecordError."""
        raw = self._files.read(self.path, int(self._bounds[index]), int(self._bounds[index + 1]))
        where = self.where(index)
        try:
            line = raw.decode("utf-8-sig" if index == 0 else "utf-8")
        except UnicodeDecodeError as error:
            raise BadRecordError(f"{where}: not UTF-8 ({error.reason} at byte {error.start} of the line)") from error
        if not line.strip():
            return None
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadRecordError(f"{where}: not JSON ({error})") from error
        if not isinstance(record, dict):
            raise BadRecordError(f"{where}: a JSON {type(record).__name__}, expected an object with the field {self.text_field!r}")
        return record

    def text(self, index: int) -> str:
        """The field of line `index + 1`."""
        record = self.record(index)
        return "" if record is None else self.text_of(record, index)

    def text_of(self, record: Mapping[str, Any], index: int) -> str:
        """The field of a record that `record` gave. Raises BadRecordError."""
        where = self.where(index)
        if self.text_field not in record:
            raise BadRecordError(f"{where}: no field {self.text_field!r}; the record has {sorted(record)}")
        text = record[self.text_field]
        if not isinstance(text, str):
            raise BadRecordError(f"{where}: field {self.text_field!r} is a {type(text).__name__}, expected a string")
        try:
            text.encode("utf-8")  # "\ud800" is valid JSON and no text
        except UnicodeEncodeError as error:
            raise BadRecordError(f"{where}: field {self.text_field!r} has a lone surrogate at character {error.start}") from error
        return text


def _line_bounds(path: epath.Path) -> np.ndarray:
    """[lines + 1] int64: where each line begins, and where the last one ends."""
    starts = [np.zeros(1, np.int64)]
    size = 0
    with path.open("rb") as file:
        while chunk := file.read(_SCAN_BYTES):
            starts.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == _NEWLINE) + (size + 1))
            size += len(chunk)
    bounds = np.concatenate(starts)
    # A last line without a newline still is a line.
    return bounds if bounds[-1] == size else np.append(bounds, size)
