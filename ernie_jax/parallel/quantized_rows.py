"""How rows are written for an exchange: as they are, in bfloat16, in 8-bit floats with a scale a tile, or in 8-bit integers.

`fp8` is E4M3 with a scale for each 1 x 128 tile of a row, `int8` has one for the row.

S rows, D columns, W words of a row. A written row is a run of words, unsigned integers of the width of the format's values:
no backend widens integers on the wire, as XLA:CPU does with bfloat16, and the scales of a row stand behind its values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp


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
class Scaled:
    """8-bit values with a float32 scale for each run of them: scale = max |x| / limit, and 1 for a run of zeros.

    What is not finite is not finite when read, by its scale; what is too small for a normal scale reads as zero.

    Attributes:
      values: `float8_e4m3fn` or `int8`, integers rounded to the nearest.
      limit: largest magnitude of a value.
      run: columns of a run, the last one of a row shorter; None for the whole row.
    """

    values: str
    limit: float
    run: int | None

    @property
    def word(self) -> jnp.dtype:
        """See `RowFormat`."""
        return jnp.dtype("uint8")

    @property
    def weights(self) -> jnp.dtype:
        """See `RowFormat`."""
        return jnp.dtype("bfloat16")

    def width(self, columns: int) -> int:
        """See `RowFormat`: D bytes and 4 for each run."""
        return columns + 4 * math.ceil(columns / (self.run or columns))

    def quantize(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[..., D] -> (values [..., D], scales [..., runs] float32)."""
        columns = rows.shape[-1]
        runs = self._runs(rows.astype(jnp.float32))
        scales = jnp.max(jnp.abs(runs), -1) / self.limit
        # A quotient by a scale that is flushed to zero would be 0 / 0.
        scales = jnp.where(scales < jnp.finfo(jnp.float32).tiny, 1.0, scales)
        scaled = runs / scales[..., None]
        if self.values == "int8":
            scaled = jnp.nan_to_num(jnp.round(scaled))
        values = jnp.clip(scaled, -self.limit, self.limit).astype(self.values)
        return values.reshape(*rows.shape[:-1], -1)[..., :columns], scales

    def dequantize(self, values: jax.Array, scales: jax.Array) -> jax.Array:
        """[..., D] float32 from what `quantize` gives."""
        columns = values.shape[-1]
        rows = self._runs(values.astype(jnp.float32)) * scales[..., None]
        return rows.reshape(*values.shape[:-1], -1)[..., :columns]

    def write(self, rows: jax.Array) -> jax.Array:
        """See `RowFormat`."""
        values, scales = self.quantize(rows)
        return jnp.concatenate([to_words(values, self.word), to_words(scales, self.word)], -1)

    def read(self, words: jax.Array, columns: int, dtype: jnp.dtype) -> jax.Array:
        """See `RowFormat`."""
        values = from_words(words[..., :columns], jnp.dtype(self.values))
        return self.dequantize(values, from_words(words[..., columns:], jnp.dtype("float32"))).astype(dtype)

    def _runs(self, rows: jax.Array) -> jax.Array:
        """[..., D] -> [..., runs, columns of a run], the last run filled with zeros; of a single run nothing is filled."""
        columns, run = rows.shape[-1], self.run
        if run is None or columns <= run:
            return rows[..., None, :]
        filled = jnp.pad(rows, (*((0, 0),) * (rows.ndim - 1), (0, -columns % run)))
        return filled.reshape(*rows.shape[:-1], -1, run)


# E4M3 for gradients too, as ERNIE's block-wise recipe has it: a tile's own scale makes E5M2's range needless.
FP8_TILES = Scaled("float8_e4m3fn", 448.0, 128)
INT8_ROWS = Scaled("int8", 127.0, None)
INT8_TILES = Scaled("int8", 127.0, 128)

ROW_FORMATS: dict[str, RowFormat] = {
    "float32": Plain("float32"),
    "bfloat16": Plain("bfloat16"),
    "fp8": FP8_TILES,
    "int8": INT8_ROWS,
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


def to_words(values: jax.Array, word: jnp.dtype) -> jax.Array:
    """The bits of [..., C] as words [..., C'] of at most the width of a value."""
    words = jax.lax.bitcast_convert_type(values, word)
    return words if words.ndim == values.ndim else words.reshape(*values.shape[:-1], -1)


def from_words(words: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The values [..., C] whose bits `to_words` gave."""
    each = dtype.itemsize // words.dtype.itemsize
    return jax.lax.bitcast_convert_type(words if each == 1 else words.reshape(*words.shape[:-1], -1, each), dtype)
