"""Packed rows to the arrays of a batch, rows and images spread evenly over the devices.

B rows of this host, T tokens, G groups of rows (shards times microbatches), M devices of a group, n patches and k token rows of a
device, C values of a patch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ernie_jax.data.multimodal.packing import PackedRow
from ernie_jax.data.multimodal.shape import BatchShape, RowLimits
from ernie_jax.data.packing import IGNORE, Row
from ernie_jax.data.vision.balance import assign_rows
from ernie_jax.data.vision.patches import VisionPatches
from ernie_jax.data.vision.spread import Spread, spread_images

# Figures of a batch beside its arrays, float32 scalars: most patches of a device over the mean, of this host's groups and devices.
FIGURES = ("imbalance", "naive_imbalance")


def assemble(rows: Sequence[PackedRow], shape: BatchShape, *, merge_size: int, patch_width: int, pad_token_id: int) -> Row:
    """A batch of this host.

    Args:
      rows: in order of arrival; rows of padding are added up to B.
      shape: of the batch.
      merge_size: patches of a token along each side.
      patch_width: C.
      pad_token_id: at padding.

    Returns:
      [B, T] int32: `input_ids`, `labels` (-100 for none), `segment_ids` (from 1, 0 at padding), `modality_ids`, `document_kinds`
      (1 in documents with images), `feature_ids` (row of features in the group's numbering, -1 for none); [B, T, 3] int32
      `position_ids` (time, height, width, from 0 in each document);
      `pixel_values` [G, M, n, C] float32, and int32 `patch_segment_ids` [G, M, n], `patch_position_ids` [G, M, n, 2],
      `patch_pairs` [G, M, k, 2]; float32 scalars `imbalance`, `naive_imbalance` (rows as they came, equal numbers of images).
    """
    filled = [*rows, *(PackedRow() for _ in range(shape.rows - len(rows)))]
    ordered, spread, naive = _balanced(filled, shape, merge_size)
    if shape.max_patches is not None:
        # Where they stand does not change with the size of the arrays.
        spread = _spread(ordered, shape.group_of_rows(), shape, merge_size, shape.max_patches)
    batch = _token_arrays(ordered, shape, pad_token_id)
    _number_features(batch["feature_ids"], ordered, spread)
    pixels = [patches.pixel_values for _, patches in _media(ordered)]
    batch |= {
        "pixel_values": spread.place(np.concatenate([np.zeros((0, patch_width), np.float32), *pixels])),
        "patch_segment_ids": spread.segment_ids,
        "patch_position_ids": spread.position_ids,
        "patch_pairs": spread.pairs,
        "imbalance": np.array(spread.imbalance, np.float32),
        "naive_imbalance": np.array(naive, np.float32),
    }
    return batch


def take(rows: Sequence[PackedRow], fits: Callable[[Sequence[PackedRow]], bool]) -> tuple[list[PackedRow], list[PackedRow]]:
    """The rows of a batch, and those left to the next one: its last ones with images, until those of the rest fit."""
    taken: list[PackedRow] = list(rows)
    left: list[PackedRow] = []
    while not fits(taken):
        last = max(index for index, row in enumerate(taken) if row.patches)
        left.insert(0, taken.pop(last))
    return taken, left


def fits(rows: Sequence[PackedRow], shape: BatchShape, limits: RowLimits) -> bool:
    """Whether the images of this host's rows go on its devices, `max_patches` on each at most."""
    if limits.share is None or shape.max_patches is None or all(row.patches <= limits.share for row in rows):
        return True
    filled = [*rows, *(PackedRow() for _ in range(shape.rows - len(rows)))]
    return _balanced(filled, shape, limits.merge_size)[1].fullest <= shape.max_patches


def _balanced(rows: list[PackedRow], shape: BatchShape, merge_size: int) -> tuple[list[PackedRow], Spread, float]:
    """The rows in the order in which their patches are spread most evenly, where these go, and the imbalance of the naive split."""
    groups = shape.group_of_rows()
    order = assign_rows([row.patches for row in rows], shape.groups)
    # Place i of the order belongs to group i // R; the rows of a group need not be next to each other.
    places = np.argsort(groups, kind="stable")
    moved = list(rows)
    for place, index in zip(places.tolist(), order.tolist(), strict=True):
        moved[place] = rows[index]
    as_they_came, balanced = (_spread(candidate, groups, shape, merge_size) for candidate in (rows, moved))
    naive = as_they_came.naive_imbalance
    # Even sums of groups nearly always mean even devices, but not when a few large images make a group.
    if as_they_came.imbalance <= balanced.imbalance:
        return rows, as_they_came, naive
    return moved, balanced, naive


def _spread(
    rows: list[PackedRow], groups: np.ndarray, shape: BatchShape, merge_size: int, max_patches: int | None = None
) -> Spread:
    media = list(_media(rows))
    return spread_images(
        [patches.grid_thw for _, patches in media],
        [int(groups[row]) for row, _ in media],
        num_groups=shape.groups,
        ranks=shape.ranks,
        merge_size=merge_size,
        max_patches=max_patches,
    )


def _media(rows: Sequence[PackedRow]) -> Iterator[tuple[int, VisionPatches]]:
    """(row, image or video), in order."""
    for index, row in enumerate(rows):
        for piece in row.pieces:
            for patches in piece.document.media:
                yield index, patches


def _token_arrays(rows: Sequence[PackedRow], shape: BatchShape, pad_token_id: int) -> Row:
    size = (shape.rows, shape.seq_len)
    fills = {
        "input_ids": pad_token_id,
        "labels": IGNORE,
        "segment_ids": 0,
        "modality_ids": 0,
        "document_kinds": 0,
        "feature_ids": -1,
    }
    batch = {key: np.full(size, fill, np.int32) for key, fill in fills.items()}
    batch["position_ids"] = np.zeros((*size, 3), np.int32)
    for index, row in enumerate(rows):
        start = 0
        for segment, piece in enumerate(row.pieces, 1):
            document, inside = piece.document, slice(piece.start, piece.stop)
            at = index, slice(start, start + piece.stop - piece.start)
            batch["input_ids"][at] = document.input_ids[inside]
            # Where a text is cut, the last label is the first token of the next row.
            batch["labels"][at] = document.labels[inside]
            batch["segment_ids"][at] = segment
            batch["modality_ids"][at] = document.modality_ids[inside]
            batch["document_kinds"][at] = bool(document.media)
            # The pieces of a text each count from 0: they do not see each other.
            batch["position_ids"][at] = document.position_ids[inside] - document.position_ids[piece.start]
            start = at[1].stop
    return batch


def _number_features(feature_ids: np.ndarray, rows: Sequence[PackedRow], spread: Spread) -> None:
    """Writes each placeholder's row of features."""
    numbers = iter(spread.rows)
    for index, row in enumerate(rows):
        start = 0
        for piece in row.pieces:
            document = piece.document
            if document.media:
                places = start + np.flatnonzero(document.placeholders)
                feature_ids[index, places] = np.concatenate([next(numbers) for _ in document.media])
            start += piece.stop - piece.start
