"""Rows of which only the elements of largest magnitude are written, exactly; the others read as zero.

D columns, of which the k = ceil(fraction x D) largest are written, W bytes of a written row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ernie_jax.parallel.quantized_rows import from_words, to_words

_BYTE, _PLACE, _VALUE = jnp.dtype("uint8"), jnp.dtype("uint32"), jnp.dtype("float32")


@dataclass(frozen=True)
class LargestElements:
    """A row as k values of float32, behind where they stand: a bit a column, or a number a value where that is shorter.

    Attributes:
      fraction: of the columns, at least one of each row.
    """

    fraction: float

    def width(self, columns: int) -> int:
        """W, bytes of a row of D columns."""
        count = self._count(columns)
        return _VALUE.itemsize * count + self._bytes_of_places(columns)

    def write(self, rows: jax.Array) -> jax.Array:
        """[S, D] float32 -> [S, W] uint8."""
        columns = rows.shape[-1]
        count = self._count(columns)
        chosen = jax.vmap(lambda row: among_largest(row, count))(rows)
        places = jax.vmap(lambda row: jnp.nonzero(row, size=count)[0])(chosen)
        values = jnp.take_along_axis(rows, places, -1)
        where = jnp.packbits(chosen, axis=-1) if self._as_bits(columns) else to_words(places.astype(_PLACE), _BYTE)
        return jnp.concatenate([where, to_words(values, _BYTE)], -1)

    def read(self, words: jax.Array, columns: int) -> jax.Array:
        """[S, W] uint8 -> [S, D] float32."""
        behind = self._bytes_of_places(columns)
        values = from_words(words[..., behind:], _VALUE)
        if self._as_bits(columns):
            chosen = jnp.unpackbits(words[..., :behind], axis=-1, count=columns)
            nth = jnp.cumsum(chosen, -1, dtype=jnp.int32) - 1
            return jnp.where(chosen == 1, jnp.take_along_axis(values, jnp.maximum(nth, 0), -1), 0.0)
        places = from_words(words[..., :behind], _PLACE)
        nothing = jnp.zeros(columns, _VALUE)
        return jax.vmap(lambda place, value: nothing.at[place].set(value, unique_indices=True))(places, values)

    def _count(self, columns: int) -> int:
        return min(columns, max(1, math.ceil(self.fraction * columns)))

    def _as_bits(self, columns: int) -> bool:
        return math.ceil(columns / 8) <= _PLACE.itemsize * self._count(columns)

    def _bytes_of_places(self, columns: int) -> int:
        return math.ceil(columns / 8) if self._as_bits(columns) else _PLACE.itemsize * self._count(columns)


def among_largest(array: jax.Array, count: int) -> jax.Array:
    """[D] bool, which are the `count` elements of largest magnitude of `array` [D] float32; of equal ones the first.

    Non-negative floats are ordered as their bits are, so the least magnitude to be taken is found bit by bit, by 31 counts:
    `jax.lax.top_k` sorts where the number is large, which takes seven times as long on CPU.
    """
    bits = jax.lax.bitcast_convert_type(jnp.abs(array), jnp.uint32)

    def with_bit(i: jax.Array, least: jax.Array) -> jax.Array:
        raised = least | (jnp.uint32(1) << (30 - i).astype(jnp.uint32))
        return jnp.where(jnp.sum(bits >= raised, dtype=jnp.int32) >= count, raised, least)

    least = jax.lax.fori_loop(0, 31, with_bit, jnp.uint32(0))
    above, equal = bits > least, bits == least
    room = count - jnp.sum(above, dtype=jnp.int32)
    return above | (equal & (jnp.cumsum(equal, dtype=jnp.int32) <= room))
