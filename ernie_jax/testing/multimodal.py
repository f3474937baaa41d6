"""Random rows of text, images and videos, laid out for any mesh: the tokens are the same, only the images lie elsewhere.

B rows, T tokens, S groups of rows, M devices of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ernie_jax.config import ModelConfig
from ernie_jax.data.vision.geometry import Grid, tokens_of_grid
from ernie_jax.data.vision.positions import media_positions
from ernie_jax.data.vision.spread import spread_images

# A document: numbers of text tokens and grids of images (one frame) and videos, in order.
Document = Sequence[int | Grid]

_HEAVY: Sequence[Document] = [[1, (1, 6, 8), 1]]
_SERIES: Sequence[Document] = [[2, (1, 4, 4), (4, 2, 4), (1, 2, 6), 1]]
# Rows of 24 tokens: text with images and a video; mostly images; nothing but images; no image; images in the first row alone.
_IMAGE, _WIDE, _TALL, _VIDEO, _LARGE = (1, 4, 4), (1, 2, 6), (1, 6, 2), (4, 2, 4), (1, 6, 8)
BATCHES: dict[str, Sequence[Sequence[Document]]] = {
    "mixed": [
        [[5], [2, _IMAGE, 3, _VIDEO, 2]],
        [[24]],
        [[3, _WIDE, 4], [5], [1, _TALL, 1]],
        [[9]],
        [[2, _LARGE, 4]],
        [[4, _VIDEO, 5]],
        [[9], [7, _IMAGE, 2]],
        [[1, _TALL, 1, _WIDE, 3]],
    ],
    "image heavy": [*[_HEAVY] * 5, *[_SERIES] * 3],
    "image only": [[[_LARGE]], [[_IMAGE, _IMAGE]], [[_VIDEO]], [[_WIDE], [_TALL]]] * 2,
    "text only": [[[24]], [[7], [9]], [[3]], [[24]]] * 2,
    "one row with images": [[[2, _LARGE, 3]], *[[[20]]] * 7],
}


@dataclass
class _Row:
    """One row being written."""

    ids: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    modality: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    grids: list[Grid] = field(default_factory=list)
    documents: list[int] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)


class MultimodalRows:
    """Random tokens and pixels for rows of documents.

    Args:
      config: a vision-language model.
      rows: documents of each row; a row longer than `tokens` is an error.
      tokens: T.
      seed: of tokens and pixels.
    """

    def __init__(self, config: ModelConfig, rows: Sequence[Sequence[Document]], tokens: int, seed: int = 0) -> None:
        assert config.vision is not None
        self._vision = config.vision
        self._rng = np.random.default_rng(seed)
        self._text = min(config.vision.image_token_id, config.vision.video_token_id)
        written = [self._write(documents) for documents in rows]

        def padded(values: Sequence[int], fill: int = 0) -> list[int]:
            assert len(values) <= tokens, (len(values), tokens)
            return [*values, *[fill] * (tokens - len(values))]

        def table(name: str) -> np.ndarray:
            return np.array([padded(getattr(row, name)) for row in written], np.int32)

        ids, segments = table("ids"), table("segments")
        scored = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0) & (table("modality")[:, 1:] == 0)
        labels = np.full(ids.shape, -100, np.int32)
        labels[:, :-1][scored] = ids[:, 1:][scored]
        positions = np.zeros((*ids.shape, 3), np.int32)
        for r, row in enumerate(written):
            found = np.concatenate(row.positions, axis=1).T
            positions[r, : len(found)] = found
        self._placeholders = table("kinds") > 0
        self.tokens: dict[str, np.ndarray] = {
            "input_ids": ids,
            "labels": labels,
            "segment_ids": segments,
            "position_ids": positions,
            "modality_ids": table("modality"),
            "document_kinds": table("documents"),
        }
        self.grids = [grid for row in written for grid in row.grids]
        self.owners = [r for r, row in enumerate(written) for _ in row.grids]
        count, width = sum(int(np.prod(g)) for g in self.grids), self._vision.in_channels * self._vision.patch_size**2
        self.pixels = self._rng.normal(size=(count, width)).astype(np.float32)

    def batch(
        self, shards: int = 1, ranks: int = 1, *, accumulate: int = 1, max_patches: int | None = None
    ) -> dict[str, np.ndarray]:
        """The batch for S = shards x accumulate groups of M = ranks devices, with the arrays of `MULTIMODAL_KEYS`."""
        per_shard = len(self.tokens["input_ids"]) // shards
        groups = [(row // per_shard) * accumulate + row % accumulate for row in self.owners]
        spread = spread_images(
            self.grids,
            groups,
            num_groups=shards * accumulate,
            ranks=ranks,
            merge_size=self._vision.spatial_merge_size,
            max_patches=max_patches,
        )
        features = np.full(self.tokens["input_ids"].shape, -1, np.int32)
        features[self._placeholders] = np.concatenate([np.zeros(0, np.int32), *spread.rows])
        return {
            **self.tokens,
            "feature_ids": features,
            "pixel_values": spread.place(self.pixels),
            "patch_segment_ids": spread.segment_ids,
            "patch_position_ids": spread.position_ids,
            "patch_pairs": spread.pairs,
        }

    def _write(self, documents: Sequence[Document]) -> _Row:
        row, vision = _Row(), self._vision
        for number, document in enumerate(documents, 1):
            start, first_grid = len(row.ids), len(row.grids)
            for item in document:
                if isinstance(item, int):
                    self._add(row, self._rng.integers(3, self._text, item).tolist(), 0, 0)
                    continue
                kind = 1 if item[0] == 1 else 2
                image = vision.image_start_token_id, vision.image_token_id, vision.image_end_token_id
                video = vision.video_start_token_id, vision.video_token_id, vision.video_end_token_id
                begin, place, end = image if kind == 1 else video
                self._add(row, [begin], kind, 0)
                self._add(row, [place] * tokens_of_grid(item, vision.spatial_merge_size), kind, kind)
                self._add(row, [end], kind, 0)
                row.grids.append(item)
            count = len(row.ids) - start
            row.segments += [number] * count
            row.documents += [int(len(row.grids) > first_grid)] * count
            kinds = np.array(row.kinds[start:])
            row.positions.append(media_positions(kinds, row.grids[first_grid:], merge_size=vision.spatial_merge_size))
        return row

    def _add(self, row: _Row, ids: list[int], modality: int, kind: int) -> None:
        row.ids += ids
        row.modality += [modality] * len(ids)
        row.kinds += [kind] * len(ids)


def multimodal_rows(config: ModelConfig, name: str = "mixed", tokens: int = 24, seed: int = 0) -> MultimodalRows:
    """Eight rows: a key of `BATCHES`."""
    return MultimodalRows(config, BATCHES[name], tokens, seed)
