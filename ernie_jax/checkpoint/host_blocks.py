"""Regions of sharded arrays on the host of process 0, without ever holding a whole array there."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from ernie_jax.checkpoint.hub_tensors import Region
from ernie_jax.checkpoint.placement import pieces

# Bytes that cross the network at once when several processes hold an array.
_EXCHANGE = 64 << 20


def host_block(array: jax.Array, region: Region) -> np.ndarray:
    """A region of an array as a host array; with several processes all of them must call, and only process 0 may use the result."""
    block = np.zeros([s.stop - s.start for s in region], array.dtype)
    _copy_local(array, region, block)
    if jax.process_count() > 1:
        _combine(block)
    return block


def _copy_local(array: jax.Array, region: Region, block: np.ndarray) -> None:
    """Copy what this process owns; of the copies of a part, one process owns it."""
    for shard in array.addressable_shards:
        if shard.replica_id:
            continue
        bounds = [slice(*s.indices(n)) for s, n in zip(shard.index, array.shape, strict=True)]
        common = [slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(bounds, region, strict=True)]
        if any(s.start >= s.stop for s in common):
            continue
        start = [c.start - b.start for c, b in zip(common, bounds, strict=True)]
        size = tuple(s.stop - s.start for s in common)
        target = tuple(slice(c.start - r.start, c.stop - r.start) for c, r in zip(common, region, strict=True))
        if shard.device.platform == "cpu":
            # Host memory already: a view costs neither a copy nor a program for every shape.
            block[target] = np.asarray(shard.data)[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]
        else:
            block[target] = np.asarray(cut_on_device(shard.data, start, size))


@functools.partial(jax.jit, static_argnums=2)
def cut_on_device(data: jax.Array, start: list[int], size: tuple[int, ...]) -> jax.Array:
    """A part of an array, cut where it lives, so that only the part travels to the host; one program a shape."""
    return jax.lax.dynamic_slice(data, start, size)


def _combine(block: np.ndarray) -> None:
    """Merge the parts of all processes, as bits: a sum would turn -0.0 into 0.0."""
    for part in _parts(block.shape, block.itemsize):
        bits = np.ascontiguousarray(block[part]).view(np.uint8)
        block[part] = np.bitwise_or.reduce(multihost_utils.process_allgather(bits), axis=0).view(block.dtype)


def _parts(shape: Sequence[int], itemsize: int) -> Iterator[Region]:
    budget = max(1, _EXCHANGE // jax.process_count())
    return pieces(tuple(slice(0, n) for n in shape), itemsize, budget)
