"""Sums over devices with few bytes on the wire, and what rounding leaves behind carried into the next sum.

For use inside `shard_map` over a named axis of G devices, on named arrays of which each device holds its own. N elements
of an array.

Each device writes its array in fewer bytes and sends one part of it to each peer; a device adds the parts it got in float32, writes
the sum likewise and sends it to all. What float32 needs is 4 N bytes received twice.

`int8`, `fp8`: runs of 128 with a scale each, (1 + 1/32) N bytes. `sparse`: the largest fraction f of each part as it is, with a
bit an element for where they stand, (4 f + 1/8) N bytes, or 8 f N where that is less; of the sums likewise (as in Li and Hoefler
2022), but as `int8` where that is less, f between 0.23 and 1.

Error feedback (Seide et al. 2014; Karimireddy et al. 2019): what a device did not send it adds to its next array, and likewise
for the sums. Over steps, then, all that was put in comes out, except for what is still held back:

    sum over steps of what came out = sum over steps and devices of what went in - sum over devices of what is held back
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp

from ernie_jax.parallel.largest_elements import LargestElements
from ernie_jax.parallel.quantized_rows import FP8_TILES, INT8_TILES, Scaled

RUN = 128


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeldBack:
    """What one device has not sent of one array.

    Attributes:
      of_array: as the array, float32.
      of_sum: of the part of the sum that the device sends to all, [part] float32.
    """

    of_array: jax.Array
    of_sum: jax.Array


class Rows(Protocol):
    """How the parts of an array are written, see `quantized_rows` and `largest_elements`: a function of each row alone."""

    def width(self, columns: int) -> int:
        """Bytes of a row."""
        ...

    def write(self, rows: jax.Array) -> jax.Array:
        """[S, columns] float32 -> [S, bytes] uint8."""
        ...

    def read(self, words: jax.Array, columns: int) -> jax.Array:
        """[S, bytes] uint8 -> [S, columns] float32."""
        ...


@dataclass(frozen=True)
class Rounded:
    """Rows of 8-bit values with scales."""

    values: Scaled

    def width(self, columns: int) -> int:
        """See `Rows`."""
        return self.values.width(columns)

    def write(self, rows: jax.Array) -> jax.Array:
        """See `Rows`."""
        return self.values.write(rows)

    def read(self, words: jax.Array, columns: int) -> jax.Array:
        """See `Rows`."""
        return self.values.read(words, columns, jnp.dtype("float32"))


@dataclass(frozen=True)
class Compression:
    """A way to sum arrays over the G devices of an axis.

    Attributes:
      terms: how what is added is written.
      sums: how sums are written.
    """

    terms: Rows
    sums: Rows

    def nothing(self, size: int, devices: int) -> HeldBack:
        """What is held back before the first sum of arrays [N]."""
        return HeldBack(jnp.zeros((size,), jnp.float32), jnp.zeros((self._part(size, devices),), jnp.float32))

    def sum(self, array: jax.Array, held: HeldBack, axis: str) -> tuple[jax.Array, HeldBack]:
        """(sum [N] float32, the same on every device; held back) of arrays [N]."""
        part, of_array = self.scatter_sum(array, held.of_array, axis)
        part = part + held.of_sum
        words = self.sums.write(part[None])
        sent, whole = (self.sums.read(w, part.size) for w in (words, jax.lax.all_gather(words[0], axis)))
        return whole.reshape(-1)[: array.size], HeldBack(of_array, part - sent[0])

    def scatter_sum(self, array: jax.Array, held: jax.Array, axis: str) -> tuple[jax.Array, jax.Array]:
        """(this device's part of the sum [part], held back [N]) of arrays [N]; the parts in order, filled up with zeros, are it."""
        devices, size = jax.lax.axis_size(axis), array.size
        own = array.astype(jnp.float32) + held
        parts = jnp.pad(own, (0, devices * self._part(size, devices) - size)).reshape(devices, -1)
        words = self.terms.write(parts)
        arrived = jax.lax.all_to_all(words, axis, split_axis=0, concat_axis=0, tiled=True)
        sent, read = (self.terms.read(w, parts.shape[1]) for w in (words, arrived))
        return read.sum(0), own - sent.reshape(-1)[:size]

    def bytes(self, size: int, devices: int) -> tuple[int, int]:
        """That a device receives of terms and of sums, for arrays [N], its own share included."""
        part = self._part(size, devices)
        return devices * self.terms.width(part), devices * self.sums.width(part)

    def _part(self, size: int, devices: int) -> int:
        """Elements of each device's part of the sum, whole runs."""
        return math.ceil(size / (devices * RUN)) * RUN


def _rounded(values: Scaled) -> Compression:
    return Compression(Rounded(values), Rounded(values))


def _sparse(fraction: float) -> Compression:
    terms = LargestElements(fraction)
    # Of the largest of several devices together more stand out than of one: where all of them, rounded, are shorter, they go. With
    # a fraction of 1 nothing is held back.
    whole = Rounded(INT8_TILES)
    return Compression(terms, terms if fraction == 1 or terms.width(RUN) < whole.width(RUN) else whole)


COMPRESSIONS: dict[str, Callable[[float], Compression]] = {
    "int8": lambda fraction: _rounded(INT8_TILES),
    "fp8": lambda fraction: _rounded(FP8_TILES),
    "sparse": _sparse,
}


def make_compression(name: str, fraction: float = 0.3) -> Compression:
    """The compression called `name`; `fraction` is for `sparse`.

    Raises:
      ValueError: an unknown name, or a fraction outside (0, 1].
    """
    if name not in COMPRESSIONS:
        raise ValueError(f"unknown gradient compression {name!r}; expected one of {sorted(COMPRESSIONS)}")
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction={fraction} of the elements to send; expected a number above 0 and at most 1")
    return COMPRESSIONS[name](fraction)


Held = dict[str, HeldBack | None]


def nothing_held(compression: Compression, sizes: Mapping[str, int], devices: int, least: int = 0) -> Held:
    """What a device has held back of each array before the first sum, None of those that travel as they are.

    Args:
      compression: of the sums.
      sizes: elements of each array on one device.
      devices: G.
      least: arrays of fewer elements than this travel as they are.
    """
    return {name: None if size < least else compression.nothing(size, devices) for name, size in sizes.items()}


def compressed_sum(
    compression: Compression, arrays: Mapping[str, jax.Array], held: Held, axis: str
) -> tuple[dict[str, jax.Array], Held]:
    """Sums of arrays over the devices of `axis`, for use inside `shard_map`.

    Args:
      compression: how they travel.
      arrays: by name.
      held: as `nothing_held` or the last call gave it; an array that has None there is summed as it is.
      axis: of the mesh.

    Returns:
      (sums in float32, the same on every device of the axis; held back).
    """
    sums: dict[str, jax.Array] = {}
    kept: Held = {}
    with jax.named_scope("compressed_sum"):
        for name, array in arrays.items():
            own = held[name]
            if own is None:
                sums[name], kept[name] = jax.lax.psum(array.astype(jnp.float32), axis), None
            else:
                total, kept[name] = compression.sum(array.reshape(-1), own, axis)
                sums[name] = total.reshape(array.shape)
    return sums, kept
