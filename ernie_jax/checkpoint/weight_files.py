"""The safetensors files of a published checkpoint, read a slice at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

FLOAT_FORMATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor is and what it is: file, format (`F32`, `BF16`, ...), shape; its name in the file where that is another."""

    file: Path
    format: str
    shape: tuple[int, ...]
    stored_as: str | None = None


class WeightFiles:
    """All tensors of a folder, one file or many, opened lazily.

    At most one file is mapped, and it is mapped anew after `budget` bytes: pages that were read count as this process's
    memory until then.

    Attributes:
      entries: what is in the files, by name.
      largest_file: bytes.

    Raises:
      ValueError: no folder, no weights, an unreadable, truncated or missing file, an index that disagrees with its files.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ValueError(f"no checkpoint folder at {self.folder}; expected one with config.json and {SINGLE_FILE} or its index")
        mapping = _index(self.folder)
        files = _files(self.folder, mapping)
        self.entries: dict[str, TensorEntry] = {}
        for file in files:
            self._read_header(file)
        _check_index(self.folder, mapping, self.entries)
        self.largest_file = max(file.stat().st_size for file in files)
        self.budget = self.largest_file
        self._open: tuple[Path, Any] | None = None
        self._read = 0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor."""
        return {name: entry.shape for name, entry in self.entries.items()}

    def read(self, name: str, region: Sequence[slice] | None = None) -> np.ndarray:
        """A tensor, or a region of it, as a new host array."""
        entry = self.entries[name]
        tensor = self._handle(entry.file).get_slice(entry.stored_as or name)
        # A rank-0 tensor cannot be sliced; an empty tuple of slices is not accepted.
        block: np.ndarray = tensor[tuple(region) if region else ...]
        self._read += block.nbytes
        return block

    def rename(self, prefixes: Mapping[str, str]) -> None:
        """Enter tensors whose names begin with a key of `prefixes` under the value instead.

        Raises:
          ValueError: a tensor is there under both names.
        """
        for old, new in prefixes.items():
            for name in [name for name in self.entries if name.startswith(old)]:
                renamed = new + name.removeprefix(old)
                if renamed in self.entries:
                    raise ValueError(f"{self.folder}: {name} and {renamed} are two names of one tensor; keep one")
                self.entries[renamed] = replace(self.entries.pop(name), stored_as=name)

    def close(self) -> None:
        """Unmap the open file."""
        if self._open is not None:
            self._open[1].__exit__(None, None, None)
            self._open = None

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _handle(self, file: Path) -> Any:
        if self._open is not None and self._open[0] == file and self._read < self.budget:
            return self._open[1]
        self.close()
        self._open, self._read = (file, safe_open(file, framework="numpy")), 0
        return self._open[1]

    def _read_header(self, file: Path) -> None:
        try:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    piece = tensors.get_slice(name)
                    if name in self.entries:
                        raise ValueError(f"{name} is in two files, {self.entries[name].file} and {file}; it belongs in one")
                    self.entries[name] = TensorEntry(file, piece.get_dtype(), tuple(piece.get_shape()))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is truncated or not a safetensors file ({error}); fetch or export it again") from error


def _index(folder: Path) -> Mapping[str, str] | None:
    path = folder / INDEX_FILE
    if (folder / SINGLE_FILE).exists():
        if path.exists():
            raise ValueError(f"{folder} has both {SINGLE_FILE} and {INDEX_FILE}; remove the one that an older export left over")
        return None
    if not path.exists():
        other = sorted(p.name for p in folder.iterdir() if p.suffix in (".safetensors", ".bin", ".pdparams"))
        found = f"; found {', '.join(other[:5])}, of which the index is missing or the format is another" if other else ""
        raise ValueError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}{found}")
    try:
        mapping = json.loads(path.read_text())["weight_map"]
        if not isinstance(mapping, dict) or not all(isinstance(v, str) for v in mapping.values()):
            raise TypeError("weight_map is not an object of strings")
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not an index of safetensors files ({error}); expected an object with weight_map") from error
    return mapping


def _files(folder: Path, mapping: Mapping[str, str] | None) -> list[Path]:
    files = [folder / name for name in ([SINGLE_FILE] if mapping is None else sorted(set(mapping.values())))]
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise ValueError(f"{folder}: the index names {len(files)} files, of which these are missing: {', '.join(missing) or 'all'}")
    return files


def _check_index(folder: Path, mapping: Mapping[str, str] | None, entries: Mapping[str, TensorEntry]) -> None:
    if mapping is None:
        return
    wrong = [f"{name} (index: {file}, {_place(entries, name)})" for name, file in mapping.items() if _file(entries, name) != file]
    wrong += [f"{name} (index: nowhere, {_place(entries, name)})" for name in _not_in(entries, mapping)]
    if wrong:
        raise ValueError(f"{folder / INDEX_FILE} disagrees with its files on {len(wrong)} tensors: {'; '.join(wrong)}")


def _file(entries: Mapping[str, TensorEntry], name: str) -> str | None:
    return entries[name].file.name if name in entries else None


def _place(entries: Mapping[str, TensorEntry], name: str) -> str:
    return f"found: {_file(entries, name) or 'nowhere'}"


def _not_in(names: Iterable[str], known: Mapping[str, str]) -> list[str]:
    return [name for name in names if name not in known]
