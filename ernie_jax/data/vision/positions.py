"""Positions in time, height and width of a token stream with images and videos. B rows, T tokens, m merge size.

Text counts on in all three at once. An image of h x w tokens stands at one time and spreads over rows and columns; a video's
pairs of frames are its times. What comes after begins behind it. Formulas: `get_rope_index` of the reference implementation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ernie_jax.data.vision.geometry import Grid, check_grid, tokens_of_grid

# How far the count moves on behind an image or video: `reference` by its larger side (transformers), `original` to one past
# its largest position in any direction (as the models were trained). They differ for videos longer than they are wide.
ADVANCES = ("reference", "original")
TEXT, IMAGE, VIDEO = 0, 1, 2


def media_positions(
    mm_token_type_ids: np.ndarray, grids: Sequence[Sequence[int]], *, merge_size: int, advance: str = "reference"
) -> np.ndarray:
    """Positions of one row without padding.

    Args:
      mm_token_type_ids: [T], 0 text (start and end markers too), 1 image, 2 video placeholders; a run is one image or video.
      grids: of the images and videos in order of appearance.
      merge_size: m.
      advance: `reference` or `original`.

    Returns:
      [3, T] int32: time, height, width.

    Raises:
      ValueError: an unknown `advance`, a run whose length is not its grid's, more or fewer runs than grids.
    """
    if advance not in ADVANCES:
        raise ValueError(f"advance={advance!r}; expected one of {ADVANCES}")
    kinds = np.asarray(mm_token_type_ids)
    out = np.zeros((3, len(kinds)), np.int32)
    count, used = 0, 0
    for start, stop in _runs(kinds):
        if kinds[start] == TEXT:
            out[:, start:stop] = count + np.arange(stop - start)
            count += stop - start
            continue
        if used == len(grids):
            raise ValueError(
                f"tokens {start}..{stop - 1} are an image or video, but only {len(grids)} grids are given; each run needs one"
            )
        grid = check_grid(grids[used], merge_size)
        if tokens_of_grid(grid, merge_size) != stop - start:
            raise ValueError(
                f"image or video {used} with grid {grid} takes {tokens_of_grid(grid, merge_size)} tokens, the stream has "
                f"{stop - start} placeholders for it at {start}..{stop - 1}; images that follow each other need a marker between"
            )
        used += 1
        times, height, width = 1 if grid[0] == 1 else grid[0] // 2, grid[1] // merge_size, grid[2] // merge_size
        out[:, start:stop] = count + np.indices((times, height, width)).reshape(3, -1)
        count += max(height, width) if advance == "reference" else max(times, height, width)
    if used != len(grids):
        raise ValueError(f"{len(grids)} grids are given, the stream has placeholders for {used} images and videos")
    return out


def stream_positions(
    mm_token_type_ids: np.ndarray,
    image_grid_thw: np.ndarray | None,
    video_grid_thw: np.ndarray | None,
    attention_mask: np.ndarray | None = None,
    *,
    merge_size: int,
    advance: str = "reference",
) -> tuple[np.ndarray, np.ndarray]:
    """Positions of rows that share one list of images and one of videos, in order row after row.

    Args:
      mm_token_type_ids: [B, T] as for `media_positions`.
      image_grid_thw, video_grid_thw: [images, 3] and [videos, 3], None for none.
      attention_mask: [B, T], 0 at padding, which gets position 0 and does not count.
      merge_size: m.
      advance: `reference` or `original`.

    Returns:
      (positions [3, B, T] int32, rope_deltas [B] int32: position of a next token minus the number of valid tokens).

    Raises:
      ValueError: runs and grids that do not fit, naming the row.
    """
    kinds = np.asarray(mm_token_type_ids)
    valid = np.ones(kinds.shape, bool) if attention_mask is None else np.asarray(attention_mask) != 0
    positions = np.zeros((3, *kinds.shape), np.int32)
    deltas = np.zeros(len(kinds), np.int32)
    for row, grids in enumerate(grids_of_rows(kinds, valid, image_grid_thw, video_grid_thw)):
        try:
            inside = media_positions(kinds[row][valid[row]], grids, merge_size=merge_size, advance=advance)
        except ValueError as error:
            raise ValueError(f"row {row}: {error}") from error
        positions[:, row, valid[row]] = inside
        deltas[row] = inside.max(initial=-1) + 1 - valid[row].sum()
    return positions, deltas


def grids_of_rows(
    kinds: np.ndarray, valid: np.ndarray, image_grid_thw: np.ndarray | None, video_grid_thw: np.ndarray | None
) -> list[list[Grid]]:
    """For each row the grids of its images and videos in order of appearance, taken from the two lists.

    Raises:
      ValueError: more or fewer images or videos in the rows than in a list.
    """
    lists = {
        kind: [] if grids is None else np.asarray(grids).reshape(-1, 3).tolist()
        for kind, grids in ((IMAGE, image_grid_thw), (VIDEO, video_grid_thw))
    }
    used = {IMAGE: 0, VIDEO: 0}
    rows: list[list[Grid]] = []
    for row in range(len(kinds)):
        inside = kinds[row][valid[row]]
        found: list[Grid] = []
        for start, _ in _runs(inside):
            kind = int(inside[start])
            if kind != TEXT:
                if used[kind] < len(lists[kind]):
                    found.append(tuple(lists[kind][used[kind]]))
                used[kind] += 1
        rows.append(found)
    for kind, name in ((IMAGE, "image"), (VIDEO, "video")):
        if used[kind] != len(lists[kind]):
            raise ValueError(
                f"the tokens have placeholders for {used[kind]} {name}s, {name}_grid_thw has {len(lists[kind])} rows; "
                "give one grid for each, in order of appearance row after row; images that follow each other need a marker between"
            )
    return rows


def _runs(values: np.ndarray) -> Iterator[tuple[int, int]]:
    """(start, stop) of each run of equal values."""
    if len(values):
        edges = np.flatnonzero(np.diff(values)) + 1
        yield from zip([0, *edges.tolist()], [*edges.tolist(), len(values)], strict=True)
