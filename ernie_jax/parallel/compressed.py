"""Sums over devices with few bytes on the wire, and what rounding leaves behind carried into the next sum.

For use inside `shard_map` over a named axis of G devices, on named arrays of which each device holds its own. N elements
of an array.

`int8` and `fp8`: each device rounds its array, in runs of 128 with a scale each, and sends one part of it to each peer; a device
adds the parts it got in float32, rounds the sum and sends it to all. That is (1 + 1/32) N bytes received twice, where float32
needs 4 N twice. `sparse`: each device sends the largest of its elements, 8 bytes each, to all.

Error feedback (Seide et al. 2014; Karimireddy et al. 2019): what a device did not send it adds to its next array, and likewise
for the rounding of the sums. Over steps, then, all that was put in comes out, except for what is still held back:

    sum over steps of what came out = sum over steps and devices of what went in - sum over devices of what is held back
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ernie_jax.parallel.quantized_rows import FP8_TILES, INT8_TILES, Scaled

RUN = 128


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeldBack:
    """What one device has not sent of one array.

    Attributes:
      of_array: as the array, float32.
      of_sum: of the part of the sum that the device rounds, [part]; None where sums are not rounded.
    """

    of_array: jax.Array
    of_sum: jax.Array | None


@dataclass(frozen=True)
class Quantized:
    """Sums whose terms and result travel as 8-bit values with scales."""

    values: Scaled

    def nothing(self, size: int, devices: int) -> HeldBack:
        """See `Compression`."""
        return HeldBack(jnp.zeros((size,), jnp.float32), jnp.zeros((self._part(size, devices),), jnp.float32))

    def sum(self, array: jax.Array, held: HeldBack, axis: str) -> tuple[jax.Array, HeldBack]:
        """See `Compression`."""
        assert held.of_sum is not None
        part, of_array = self.scatter_sum(array, held.of_array, axis)
        part = part + held.of_sum
        sent, words = self._rounded(part[None])
        whole = self._read(jax.lax.all_gather(words[0], axis))
        return whole.reshape(-1)[: array.size], HeldBack(of_array, part - sent[0])

    def scatter_sum(self, array: jax.Array, held: jax.Array, axis: str) -> tuple[jax.Array, jax.Array]:
        """(this device's part of the sum [part], held back [N]) of arrays [N]; the parts in order, filled up with zeros, are it."""
        devices, size = jax.lax.axis_size(axis), array.size
        own = array.astype(jnp.float32) + held
        parts = jnp.pad(own, (0, devices * self._part(size, devices) - size)).reshape(devices, -1)
        sent, words = self._rounded(parts)
        arrived = self._read(jax.lax.all_to_all(words, axis, split_axis=0, concat_axis=0, tiled=True))
        return arrived.sum(0), own - sent.reshape(-1)[:size]

    def bytes(self, size: int, devices: int) -> int:
        """See `Compression`."""
        return 2 * devices * self.values.width(self._part(size, devices))

    def _part(self, size: int, devices: int) -> int:
        """Elements of each device's part of the sum, whole runs."""
        return math.ceil(size / (devices * RUN)) * RUN

    def _rounded(self, parts: jax.Array) -> tuple[jax.Array, jax.Array]:
        """([G, part] as it will be read, its words [G, W])."""
        words = self.values.write(parts)
        return self._read(words), words

    def _read(self, words: jax.Array) -> jax.Array:
        columns = words.shape[-1] * RUN // self.values.width(RUN)
        return self.values.read(words, columns, jnp.dtype("float32"))


def largest(array: jax.Array, count: int) -> jax.Array:
    """Places of the `count` elements of largest magnitude of `array` [N] float32, in their order; of equal ones the first.

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
    (place,) = jnp.nonzero(above | (equal & (jnp.cumsum(equal, dtype=jnp.int32) <= room)), size=count)
    return place


@dataclass(frozen=True)
class Sparse:
    """Sums of the elements of largest magnitude of each device's array.

    Attributes:
      fraction: of the elements that are sent, at least one of each array.
    """

    fraction: float

    def nothing(self, size: int, devices: int) -> HeldBack:
        """See `Compression`."""
        return HeldBack(jnp.zeros((size,), jnp.float32), None)

    def sum(self, array: jax.Array, held: HeldBack, axis: str) -> tuple[jax.Array, HeldBack]:
        """See `Compression`."""
        own = array.astype(jnp.float32) + held.of_array
        place = largest(own, self._count(array.size))
        # Values and places in one buffer.
        words = jnp.stack([jax.lax.bitcast_convert_type(own[place], jnp.uint32), place.astype(jnp.uint32)])
        everyone = jax.lax.all_gather(words, axis)
        values = jax.lax.bitcast_convert_type(everyone[:, 0], jnp.float32)
        total = jnp.zeros_like(own).at[everyone[:, 1].reshape(-1)].add(values.reshape(-1))
        return total, HeldBack(own.at[place].set(0.0, unique_indices=True), None)

    def bytes(self, size: int, devices: int) -> int:
        """See `Compression`."""
        return 8 * devices * self._count(size)

    def _count(self, size: int) -> int:
        return min(size, max(1, math.ceil(self.fraction * size)))


Compression = Quantized | Sparse
"""A way to sum arrays over the devices of an axis:

    nothing(N, G)             held back before the first sum
    sum(array, held, axis)    (sum [N] float32, the same on every device; held back)
    bytes(N, G)               that a device receives, its own share included
"""

COMPRESSIONS: dict[str, Callable[[float], Compression]] = {
    "int8": lambda fraction: Quantized(INT8_TILES),
    "fp8": lambda fraction: Quantized(FP8_TILES),
    "sparse": Sparse,
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
