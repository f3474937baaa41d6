"""Where patches stand in their frame, and which merged rows make a token. N patches, m merge size.

A grid is (t, h, w): frames, and patches along height and width. An image has one frame; a video's frames are taken in pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

Grid = tuple[int, int, int]


def check_grid(grid: Sequence[int], merge_size: int) -> Grid:
    """The grid as three integers.

    Raises:
      ValueError: not three positive numbers, or a height or width that m does not divide.
    """
    numbers = tuple(int(n) for n in grid)
    if len(numbers) != 3 or min(numbers) < 1:
        raise ValueError(f"grid {numbers}: expected three positive numbers (frames, patches along height, along width)")
    time, height, width = numbers
    if height % merge_size or width % merge_size:
        raise ValueError(f"grid {numbers}: height and width must be multiples of the merge size {merge_size}")
    return time, height, width


def tokens_of_grid(grid: Sequence[int], merge_size: int) -> int:
    """Tokens an image or video takes in the stream: h w / m^2 for an image, t // 2 times that for a video."""
    time, height, width = check_grid(grid, merge_size)
    return (1 if time == 1 else time // 2) * (height * width // merge_size**2)


def patch_coordinates(grids: Iterable[Sequence[int]], merge_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of each patch, in the order the processor emits them: merge blocks row by row, m x m patches in each.

    Args:
      grids: of each image or video.
      merge_size: m.

    Returns:
      (coordinates [N, 2] int32, frame_ids [N] int32 counting frames from 1).

    Raises:
      ValueError: see `check_grid`.
    """
    coordinates, frames, frame = [np.zeros((0, 2), np.int32)], [np.zeros(0, np.int32)], 0
    for grid in grids:
        time, height, width = check_grid(grid, merge_size)
        rows, columns = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
        blocks = (height // merge_size, merge_size, width // merge_size, merge_size)
        order = [a.reshape(blocks).transpose(0, 2, 1, 3).reshape(-1) for a in (rows, columns)]
        coordinates += [np.stack(order, -1)] * time
        frames.append(np.repeat(np.arange(frame + 1, frame + time + 1), height * width))
        frame += time
    return np.concatenate(coordinates).astype(np.int32), np.concatenate(frames).astype(np.int32)
