"""Images and videos of a batch spread over the devices of a mesh, as arrays of static shape.

S groups of rows (the batch shards, times the microbatches), M devices of a group (over the pipeline and tensor axes), n patches and
k token rows of a device, C patch values, m merge size.

A group's images go to the devices of that group, so features travel no further than inside it. What is placed is an image or
a pair of frames: attention stays within a frame and the resampler pairs two, so a long video may be split between devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ernie_jax.data.vision.balance import assign, imbalance, naive_assignment
from ernie_jax.data.vision.geometry import Grid, check_grid, patch_coordinates, tokens_of_grid


@dataclass(frozen=True)
class Spread:
    """Where every patch and every token row of some images is.

    Attributes:
      source: [S, M, n] int32, each place's patch in the images' order one after another; -1 is padding.
      segment_ids: [S, M, n] int32, equal within a frame, 0 at padding.
      position_ids: [S, M, n, 2] int32, row and column of a patch.
      pairs: [S, M, k, 2] int32, which two merged rows (of m^2 patches each) of a device make a token row.
      rows: for each image its token rows, int32 in 0..M k - 1, numbered through the devices of its group.
      imbalance, naive_imbalance: most patches of a device over the mean, as placed and as an equal number of images each would be.
    """

    source: np.ndarray
    segment_ids: np.ndarray
    position_ids: np.ndarray
    pairs: np.ndarray
    rows: tuple[np.ndarray, ...]
    imbalance: float
    naive_imbalance: float

    @property
    def fullest(self) -> int:
        """Most patches of a device."""
        return int((self.source >= 0).sum(-1).max(initial=0))

    def place(self, pixel_values: np.ndarray) -> np.ndarray:
        """The patches [N, C] of all images, one image after another, where they belong: [S, M, n, C], zero at padding."""
        out = np.zeros((*self.source.shape, pixel_values.shape[-1]), pixel_values.dtype)
        real = self.source >= 0
        out[real] = pixel_values[self.source[real]]
        return out


@dataclass(frozen=True)
class _Unit:
    """An image, or one or two frames of a video: what one device takes whole."""

    image: int
    first_patch: int
    frames: int
    area: int
    coordinates: np.ndarray

    @property
    def patches(self) -> int:
        return self.frames * self.area


def spread_images(
    grids: Sequence[Sequence[int]],
    groups: Sequence[int],
    *,
    num_groups: int,
    ranks: int,
    merge_size: int,
    max_patches: int | None = None,
) -> Spread:
    """Places images.

    Args:
      grids: (t, h, w) of each image or video.
      groups: the group of each, in 0..S-1: that of the row it stands in.
      num_groups: S.
      ranks: M.
      merge_size: m.
      max_patches: n, a multiple of m^2; None for the least of a few sizes that holds the fullest device, so that batches of
        different images seldom need another compilation.

    Raises:
      ValueError: a grid that m does not divide; more patches on a device than `max_patches`, with both numbers.
    """
    area = merge_size**2
    checked = [check_grid(grid, merge_size) for grid in grids]
    units = _units(checked, merge_size)
    weights = np.array([unit.patches for unit in units], np.int64)
    of_group = np.array([groups[unit.image] for unit in units], np.int64)
    device, naive = np.zeros(len(units), np.int64), np.zeros(len(units), np.int64)
    for group in range(num_groups):
        mine = of_group == group
        device[mine] = group * ranks + assign(weights[mine], ranks)
        naive[mine] = group * ranks + naive_assignment(int(mine.sum()), ranks)
    loads = np.bincount(device, weights=weights, minlength=num_groups * ranks)
    fullest = int(loads.max(initial=0))
    if max_patches is not None and fullest > max_patches:
        raise ValueError(
            f"a device would get {fullest} patches of images, max_patches is {max_patches}; raise it, put fewer or smaller "
            "images in a row, or use fewer rows for each device"
        )
    if max_patches is not None and max_patches % area:
        raise ValueError(f"max_patches={max_patches} is not a multiple of merge_size^2 = {area}")
    n = bucket(fullest // area) * area if max_patches is None else max_patches
    # A video of pairs fills half as many token rows as images; counting for images alone keeps one shape for both.
    balanced, split = (imbalance(weights, places, num_groups * ranks) for places in (device, naive))
    counts = [tokens_of_grid(grid, merge_size) for grid in checked]
    spread = replace(_empty(num_groups, ranks, n, n // area, counts), imbalance=balanced, naive_imbalance=split)
    _fill(spread, units, device, num_groups * ranks, area)
    return spread


def bucket(count: int) -> int:
    """The least of 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ... (four to a doubling) that is at least `count`."""
    step = 1
    while step * 8 < count:
        step *= 2
    return max(1, -(-count // step) * step)


def _units(grids: Sequence[Grid], merge_size: int) -> list[_Unit]:
    units: list[_Unit] = []
    patch = 0
    for image, (time, height, width) in enumerate(grids):
        size = height * width
        coordinates = patch_coordinates([(1, height, width)], merge_size)[0]
        # The last frame of an odd number has no partner and is lost, as in the reference; processors pad to even.
        frames = 1 if time == 1 else 2
        units += [_Unit(image, patch + f * size, frames, size, coordinates) for f in range(0, max(1, time // 2 * 2), frames)]
        patch += time * size
    return units


def _empty(groups: int, ranks: int, n: int, k: int, counts: Sequence[int]) -> Spread:
    def zeros(*shape: int) -> np.ndarray:
        return np.zeros((groups, ranks, *shape), np.int32)

    rows = tuple(np.zeros(count, np.int32) for count in counts)
    return Spread(zeros(n) - 1, zeros(n), zeros(n, 2), zeros(k, 2), rows, 1.0, 1.0)


def _fill(spread: Spread, units: Sequence[_Unit], device: np.ndarray, devices: int, area: int) -> None:
    ranks, n, k = *spread.source.shape[1:], spread.pairs.shape[2]
    patches, tokens, frames = (np.zeros(devices, np.int64) for _ in range(3))
    done = [0] * len(spread.rows)
    for unit, d in zip(units, device.tolist(), strict=True):
        group, rank = divmod(d, ranks)
        at = slice(int(patches[d]), int(patches[d]) + unit.patches)
        assert at.stop <= n
        spread.source[group, rank, at] = unit.first_patch + np.arange(unit.patches)
        spread.segment_ids[group, rank, at] = frames[d] + 1 + np.repeat(np.arange(unit.frames), unit.area)
        spread.position_ids[group, rank, at] = np.tile(unit.coordinates, (unit.frames, 1))
        count = unit.area // area
        first = at.start // area + np.arange(count)
        place = int(tokens[d]) + np.arange(count)
        # A single frame is paired with itself.
        spread.pairs[group, rank, place] = np.stack([first, first + (unit.frames - 1) * count], -1)
        out = spread.rows[unit.image]
        out[done[unit.image] : done[unit.image] + count] = rank * k + place
        done[unit.image] += count
        patches[d], tokens[d], frames[d] = at.stop, tokens[d] + count, frames[d] + unit.frames
