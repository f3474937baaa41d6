"""How rows are written for an exchange: as they are, in bfloat16, in 8-bit floats with a scale a tile, or in 8-bit integers.

S rows, D columns, W words of a row. A written row is a run of words, unsigned integers of the width of the format's values:
no backend widens integers on the wire, as XLA:CPU does with bfloat16, and the scales of a row stand behind its values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp

TILE = 128
FP8_MAX = 448.0
INT8_MAX = 127.0


class RowFormat(Protocol):
    """A way to write rows [S, D] as words [S, W]; `read` after `write` is the rounding of the format, a function of each row alone.

    Attributes:
      word: unsigned integer type of a word.
      weights: float type in which the mixing weights that travel beside the rows are written.
    """

    @property
    def word(self) -> jnp.dtype:
        """See the attributes."""
        ...

    @property
    def weights(self) -> jnp.dtype:
        """See the attributes."""
        ...

    def width(self, columns: int) -> int:
        """W, words of a row of D columns."""
        ...

    def write(self, rows: jax.Array) -> jax.Array:
        """[S, D] -> [S, W]."""
        ...

    def read(self, words: jax.Array, columns: int, dtype: jnp.dtype) -> jax.Array:
        """[S, W] -> [S, D]."""
        ...


@dataclass(frozen=True)
class Plain:
    """Values of a float type, bit for bit; `float32` is exact for any compute format."""

    name: str

    @property
    def word(self) -> jnp.dtype:
        """See `RowFormat`."""
        return jnp.dtype({4: "uint32", 2: "uint16"}[jnp.dtype(self.name).itemsize])

    @property
    def weights(self) -> jnp.dtype:
        """See `RowFormat`."""
        return jnp.dtype(self.name)

    def width(self, columns: int) -> int:
        """See `RowFormat`."""
        return columns

    def write(self, rows: jax.Array) -> jax.Array:
        """See `RowFormat`."""
        return to_words(rows.astype(self.name), self.word)

    def read(self, words: jax.Array, columns: int, dtype: jnp.dtype) -> jax.Array:
        """See `RowFormat`."""
        return from_words(words, jnp.dtype(self.name)).astype(dtype)


@dataclass(frozen=True)
class Fp8Tiles:
    """E4M3 with a float32 scale for each 1 x 128 tile of a row: scale = max |x| / 448, and 1 for a tile of zeros.

    E4M3 for gradients too, as ERNIE's block-wise recipe has it: a tile's own scale makes E5M2's range needless.
    """

    @property
    def word(self) -> jnp.dtype:
        """See `RowFormat`."""
        return jnp.dtype("uint8")

    @property
    def weights(self) -> jnp.dtype:
        """See `RowFormat`."""
        return jnp.dtype("bfloat16")

    def width(self, columns: int) -> int:
        """See `RowFormat`: D bytes and 4 for each tile."""
        return columns + 4 * math.ceil(columns / TILE)

    def write(self, rows: jax.Array) -> jax.Array:
        """See `RowFormat`."""
        values, scales = quantize_fp8(rows)
        return jnp.concatenate([to_words(values, self.word), to_words(scales, self.word)], -1)

    def read(self, words: jax.Array, columns: int, dtype: jnp.dtype) -> jax.Array:
        """See `RowFormat`."""
        values = from_words(words[..., :columns], jnp.dtype("float8_e4m3fn"))
        return dequantize_fp8(values, from_words(words[..., columns:], jnp.dtype("float32"))).astype(dtype)


@dataclass(frozen=True)
class Int8Rows:
    """Symmetric 8-bit integers with a float32 scale for each row: scale = max |x| / 127, and 1 for a row of zeros."""

    @property
    def word(self) -> jnp.dtype:
        """See `RowFormat`."""
        return jnp.dtype("uint8")

    @property
    def weights(self) -> jnp.dtype:
        """See `RowFormat`."""
        return jnp.dtype("bfloat16")

    def width(self, columns: int) -> int:
        """See `RowFormat`: D bytes and 4."""
        return columns + 4

    def write(self, rows: jax.Array) -> jax.Array:
        """See `RowFormat`."""
        values, scale = quantize_int8(rows)
        return jnp.concatenate([to_words(values, self.word), to_words(scale, self.word)], -1)

    def read(self, words: jax.Array, columns: int, dtype: jnp.dtype) -> jax.Array:
        """See `RowFormat`."""
        values = from_words(words[..., :columns], jnp.dtype("int8"))
        return (values.astype(jnp.float32) * from_words(words[..., columns:], jnp.dtype("float32"))).astype(dtype)


ROW_FORMATS: dict[str, RowFormat] = {
    "float32": Plain("float32"),
    "bfloat16": Plain("bfloat16"),
    "fp8": Fp8Tiles(),
    "int8": Int8Rows(),
}


def row_format(name: str | None, dtype: jnp.dtype) -> RowFormat:
    """The format called `name`; None and `compute` are the format of the rows themselves.

    Raises:
      ValueError: an unknown name.
    """
    chosen = jnp.dtype(dtype).name if name in (None, "compute") else str(name)
    if chosen not in ROW_FORMATS:
        raise ValueError(f"unknown exchange format {name!r}; expected None, 'compute' or one of {sorted(ROW_FORMATS)}")
    return ROW_FORMATS[chosen]


def quantize_fp8(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[..., D] -> (values [..., D] float8_e4m3fn, scales [..., ceil(D / 128)] float32). Not finite in, not finite out."""
    columns = rows.shape[-1]
    tiles = _tiles(rows.astype(jnp.float32))
    scales = _scale(jnp.max(jnp.abs(tiles), -1), FP8_MAX)
    values = jnp.clip(tiles / scales[..., None], -FP8_MAX, FP8_MAX).astype(jnp.float8_e4m3fn)
    return values.reshape(*rows.shape[:-1], -1)[..., :columns], scales


def dequantize_fp8(values: jax.Array, scales: jax.Array) -> jax.Array:
    """[..., D] float32 from what `quantize_fp8` gives."""
    columns = values.shape[-1]
    rows = _tiles(values.astype(jnp.float32)) * scales[..., None]
    return rows.reshape(*values.shape[:-1], -1)[..., :columns]


def quantize_int8(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[..., D] -> (values [..., D] int8, scale [..., 1] float32), rounded to the nearest, ties to even."""
    rows = rows.astype(jnp.float32)
    scale = _scale(jnp.max(jnp.abs(rows), -1, keepdims=True), INT8_MAX)
    # A row that is not finite keeps its scale so, and is not finite when read; its integers are any.
    return jnp.clip(jnp.nan_to_num(jnp.round(rows / scale)), -INT8_MAX, INT8_MAX).astype(jnp.int8), scale


def to_words(values: jax.Array, word: jnp.dtype) -> jax.Array:
    """The bits of [..., C] as words [..., C'] of at most the width of a value."""
    words = jax.lax.bitcast_convert_type(values, word)
    return words if words.ndim == values.ndim else words.reshape(*values.shape[:-1], -1)


def from_words(words: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The values [..., C] whose bits `to_words` gave."""
    each = dtype.itemsize // words.dtype.itemsize
    return jax.lax.bitcast_convert_type(words if each == 1 else words.reshape(*words.shape[:-1], -1, each), dtype)


def _tiles(rows: jax.Array) -> jax.Array:
    """[..., D] -> [..., ceil(D / 128), 128], the last tile filled with zeros; of a single narrow tile nothing is filled."""
    columns = rows.shape[-1]
    if columns <= TILE:
        return rows[..., None, :]
    filled = jnp.pad(rows, (*((0, 0),) * (rows.ndim - 1), (0, -columns % TILE)))
    return filled.reshape(*rows.shape[:-1], -1, TILE)


def _scale(largest: jax.Array, limit: float) -> jax.Array:
    scale = largest / limit
    # What is too small for a normal scale reads as zero: a quotient by a flushed scale would be 0 / 0.
    return jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1.0, scale)
