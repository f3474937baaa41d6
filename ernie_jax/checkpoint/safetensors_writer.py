"""A safetensors file written one tensor at a time.

The library's `save_file` wants all tensors of a file in memory; here only one is. Format: 8 bytes little-endian length of the
header, the header as JSON, then the tensors' bytes in the header's order
(https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np

FORMATS: Mapping[str, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}


def _item_bytes(format_: str) -> int:
    bits = re.search(r"\d+", format_)
    # BOOL is the one format without its width in its name; F8_E4M3 and its like begin with theirs.
    return int(bits[0]) // 8 if bits else 1


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: name, format (`F32`, `BF16`, ...), shape."""

    name: str
    format: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return int(np.prod(self.shape, dtype=np.int64)) * _item_bytes(self.format)


def format_of(dtype: str) -> str:
    """The safetensors name of a float format.

    Raises:
      ValueError: a dtype that weights are not stored in.
    """
    name = jnp.dtype(dtype).name
    if name not in FORMATS:
        raise ValueError(f"dtype={dtype!r}; weights are stored as one of {', '.join(FORMATS)}")
    return FORMATS[name]


def file_order(entries: Sequence[Entry]) -> list[Entry]:
    """The order of tensors within a file: wide formats first, so that each starts at a multiple of its item size."""
    return sorted(entries, key=lambda entry: -_item_bytes(entry.format))


def write_safetensors(path: Path, entries: Sequence[Entry], produce: Callable[[Entry], Iterator[np.ndarray]]) -> None:
    """Write a file and see it onto the disk.

    Args:
      path: of the file.
      entries: its tensors.
      produce: gives each tensor's values in its format when its turn comes, whole or in runs of rows.
    """
    ordered = file_order(entries)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in ordered:
        header[entry.name] = {"dtype": entry.format, "shape": list(entry.shape), "data_offsets": [offset, offset + entry.nbytes]}
        offset += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for entry in ordered:
            written = 0
            for rows in produce(entry):
                written += file.write(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
            assert written == entry.nbytes, (entry, written)
        file.flush()
        os.fsync(file.fileno())
