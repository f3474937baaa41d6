"""Arrays put together on the devices that keep them, with little of them on the host at any time."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from ernie_jax.checkpoint.hub_tensors import Region

# What XLA asks of a host buffer that it takes over without a copy.
_ALIGNMENT = 64


def pieces(region: Region, itemsize: int, budget: int) -> Iterator[Region]:
    """A region cut along its leading dimensions into pieces of at most `budget` bytes (a single row may be more)."""
    lengths = [s.stop - s.start for s in region]
    if math.prod(lengths) * itemsize <= budget or max(lengths, default=1) == 1:
        yield region
        return
    dim = next(i for i, n in enumerate(lengths) if n > 1)
    start = region[dim].start
    for run in row_runs(lengths[dim], math.prod(lengths[dim + 1 :]) * itemsize, budget):
        part = slice(start + run.start, start + run.stop)
        yield from pieces((*region[:dim], part, *region[dim + 1 :]), itemsize, budget)


def row_runs(rows: int, row_bytes: int, budget: int) -> Iterator[slice]:
    """All of `rows` in runs of at most `budget` bytes, at least a row each."""
    step = max(1, budget // max(1, row_bytes))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def assemble(
    shape: Sequence[int], dtype: DTypeLike, sharding: Sharding, read: Callable[[Region], np.ndarray], *, budget: int
) -> jax.Array:
    """An array with this sharding, each device's part read piece by piece.

    Args:
      shape, dtype, sharding: of the array.
      read: gives the host values of a region of it.
      budget: most bytes of a piece on the host.
    """
    devices: dict[tuple[tuple[int, int], ...], list[jax.Device]] = defaultdict(list)
    for device, index in sharding.addressable_devices_indices_map(tuple(shape)).items():
        bounds = (slice(*s.indices(n)) for s, n in zip(index or (), shape, strict=True))
        devices[tuple((s.start, s.stop) for s in bounds)].append(device)
    parts: list[jax.Array] = []
    for bounds_, owners in devices.items():
        region = tuple(slice(*b) for b in bounds_)
        parts += _fill(region, np.dtype(dtype), owners, read, budget)
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, parts)


def _fill(
    region: Region, dtype: np.dtype, owners: Sequence[jax.Device], read: Callable[[Region], np.ndarray], budget: int
) -> list[jax.Array]:
    """One region on each of the devices that hold it."""
    cuts = [(cut, _within(cut, region)) for cut in pieces(region, dtype.itemsize, budget)]
    if len(cuts) == 1:
        block = read(region)
        return [jax.device_put(block, device) for device in owners]
    lengths = [s.stop - s.start for s in region]
    fill = _fill_host if owners[0].platform == "cpu" else fill_device
    return fill(lengths, dtype, owners, ((place, read(cut)) for cut, place in cuts))


def _within(cut: Region, region: Region) -> Region:
    """A part of a region counted from the region's start."""
    return tuple(slice(c.start - r.start, c.stop - r.start) for c, r in zip(cut, region, strict=True))


def _fill_host(
    lengths: Sequence[int], dtype: np.dtype, owners: Sequence[jax.Device], blocks: Iterator[tuple[Region, np.ndarray]]
) -> list[jax.Array]:
    """For devices whose memory is the host's: one aligned buffer, which JAX then uses as it is."""
    size = math.prod(lengths) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    offset = -raw.ctypes.data % _ALIGNMENT
    buffer = raw[offset : offset + size].view(dtype).reshape(lengths)
    for place, block in blocks:
        buffer[place] = block
    return [jax.device_put(buffer, device) for device in owners]


def fill_device(
    lengths: Sequence[int], dtype: np.dtype, owners: Sequence[jax.Device], blocks: Iterator[tuple[Region, np.ndarray]]
) -> list[jax.Array]:
    """For devices with memory of their own: an array there that takes in one block after the other in place."""
    parts = [jnp.zeros(lengths, dtype, device=device) for device in owners]
    for place, block in blocks:
        start = [s.start for s in place]
        parts = [_write(part, jax.device_put(block, device), start) for part, device in zip(parts, owners, strict=True)]
        # Without waiting, the host would run ahead and hold many blocks.
        jax.block_until_ready(parts)
    return parts


@functools.partial(jax.jit, donate_argnums=0)
def _write(array: jax.Array, block: jax.Array, start: list[int]) -> jax.Array:
    return jax.lax.dynamic_update_slice(array, block, start)
