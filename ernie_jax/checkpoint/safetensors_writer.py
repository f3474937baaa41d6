"""A safetensors file written one tensor at a time.

The library's `save_file` wants all tensors of a file in memory; here only one is. Format: 8 bytes little-endian length of the
header, the header as JSON, then the tensors' bytes in the header's order
(https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np

FORMATS: Mapping[str, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}
_ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: name, format (`F32`, `BF16`, ...), shape."""

    name: str
    format: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return int(np.prod(self.shape, dtype=np.int64)) * _ITEM_BYTES.get(self.format, 1)


def format_of(dtype: str) -> str:
    """The safetensors name of a float format.

    Raises:
      ValueError: a dtype that weights are not stored in.
    """
    name = jnp.dtype(dtype).name
    if name not in FORMATS:
        raise ValueError(f"dtype={dtype!r}; weights are stored as one of {', '.join(FORMATS)}")
    return FORMATS[name]


def write_safetensors(path: Path, entries: Sequence[Entry], produce: Callable[[Entry], np.ndarray]) -> None:
    """Write a file and see it onto the disk.

    Args:
      path: of the file.
      entries: its tensors.
      produce: gives each tensor's values in its format when its turn comes.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    # transformers expects wide formats first, as the library writes them: each tensor then starts at a multiple of its item.
    ordered = sorted(entries, key=lambda e: -_ITEM_BYTES.get(e.format, 1))
    for entry in ordered:
        header[entry.name] = {"dtype": entry.format, "shape": list(entry.shape), "data_offsets": [offset, offset + entry.nbytes]}
        offset += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for entry in ordered:
            values = np.ascontiguousarray(produce(entry))
            assert values.nbytes == entry.nbytes, (entry, values.dtype, values.shape)
            file.write(values.reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
