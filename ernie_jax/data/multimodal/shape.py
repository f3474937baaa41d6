"""The shape of a multimodal batch, and what fits into its rows.

B rows of a batch, T tokens, S batch shards, A microbatches, M devices of a group, R rows of a group, n patches of a device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ernie_jax.data.multimodal.documents import Document
from ernie_jax.data.order import host_rows
from ernie_jax.data.vision.spread import spread_images


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Sizes of a batch. Numbers are of all hosts unless they say otherwise.

    Attributes:
      seq_len: T.
      batch_size: B.
      shards: S, over which the rows are split in order; a multiple of the hosts.
      accumulate: A; a shard's rows go to the microbatches in turn.
      ranks: M, the devices that share the images of a group.
      max_patches: n, the same for every batch; None takes the least of a few sizes that holds each batch, for one host only.
      process_index, process_count: this host among all.
    """

    seq_len: int
    batch_size: int
    shards: int = 1
    accumulate: int = 1
    ranks: int = 1
    max_patches: int | None = None
    process_index: int = 0
    process_count: int = 1

    def __post_init__(self) -> None:
        if self.seq_len < 2:
            raise ValueError(f"seq_len is {self.seq_len}; a row needs at least 2 tokens to have a label")
        for name in ("shards", "accumulate", "ranks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        host_rows(self.batch_size, self.process_index, self.process_count)
        if self.batch_size % (self.shards * self.accumulate):
            raise ValueError(
                f"batch_size {self.batch_size} does not divide into accumulate={self.accumulate} microbatches over "
                f"{self.shards} batch shards; choose a multiple of {self.accumulate * self.shards}"
            )
        if self.shards % self.process_count:
            raise ValueError(
                f"{self.shards} batch shards do not divide among {self.process_count} processes; each process must hold whole "
                "groups of devices, so give the data and expert axes a multiple of the processes"
            )
        if self.max_patches is None and self.process_count > 1:
            raise ValueError(
                "max_patches is not set; several processes need it, because each would choose a size of its own for its images"
            )

    @property
    def host(self) -> slice:
        """Which rows of the batch are this host's."""
        return host_rows(self.batch_size, self.process_index, self.process_count)

    @property
    def rows(self) -> int:
        """Rows of this host."""
        return self.batch_size // self.process_count

    @property
    def groups(self) -> int:
        """Groups of rows of this host, S A / hosts: group s A + a has the rows of shard s in microbatch a."""
        return self.shards // self.process_count * self.accumulate

    @property
    def rows_of_group(self) -> int:
        """R."""
        return self.batch_size // (self.shards * self.accumulate)

    def group_of_rows(self) -> np.ndarray:
        """[rows] int64, the group of each row of this host."""
        rows = np.arange(self.rows)
        of_shard = self.rows_of_group * self.accumulate
        return rows // of_shard * self.accumulate + rows % self.accumulate


@dataclass(frozen=True)
class RowLimits:
    """What a row takes.

    Attributes:
      tokens: T.
      merge_size: of patches to a token.
      ranks: M.
      max_patches: n; None for no limit.
      share: patches of a row with which rows of any images fit on their devices together; None for no limit. A document of more
        still has a row, but no second one with images in it.
      unit: patches of the largest image, or pair of a video's frames, that the share reckons with; None where any will do.
    """

    tokens: int
    merge_size: int
    ranks: int = 1
    max_patches: int | None = None
    share: int | None = None
    unit: int | None = None

    @classmethod
    def of(cls, shape: BatchShape, *, merge_size: int, largest_unit: int | None) -> RowLimits:
        """The limits of a batch's rows.

        Placing each unit (an image, or a pair of a video's frames) on the emptiest device leaves at most sum/M + (1 - 1/M) u on
        one, u the largest unit (Graham, 1966). With R rows of b patches this is at most n where b = (M n - (M - 1) u) / R. Within
        the share no unit is above b, so b = M n / (R + M - 1) always does, and the larger of the two is taken.

        Args:
          shape: of the batch.
          merge_size: of patches to a token.
          largest_unit: patches of the largest unit the processors make, None when that is not known.

        Raises:
          ValueError: `max_patches` is no multiple of merge_size^2.
        """
        n, m, r, area = shape.max_patches, shape.ranks, shape.rows_of_group, merge_size**2
        if n is None:
            return cls(shape.seq_len, merge_size, m)
        if n < 1 or n % area:
            raise ValueError(f"max_patches is {n}; expected a positive multiple of merge_size^2 = {area}")
        share = m * n // (r + m - 1)
        if largest_unit is not None and (m * n - (m - 1) * largest_unit) // r > share:
            return cls(shape.seq_len, merge_size, m, n, (m * n - (m - 1) * largest_unit) // r, largest_unit)
        return cls(shape.seq_len, merge_size, m, n, share)

    def check(self, document: Document) -> None:
        """ValueError for a document with images or videos that no row takes; a text can be cut and always fits."""
        if not document.media:
            return
        if len(document) > self.tokens:
            raise ValueError(
                f"{len(document)} tokens with images or videos, more than seq_len={self.tokens}; such a document is never cut: "
                "shorten it, lower max_pixels, or raise seq_len"
            )
        if self.max_patches is None:
            return
        grids = [patches.grid_thw for patches in document.media]
        # Of extreme sides, where rounding to whole tokens goes beyond max_pixels.
        largest = max(height * width * min(time, 2) for time, height, width in grids)
        if self.unit is not None and largest > self.unit:
            raise ValueError(
                f"an image or pair of frames of {largest} patches, more than the {self.unit} that the processors' max_pixels say; "
                "with max_patches set, crop it, raise max_pixels, or leave max_patches out"
            )
        spread = spread_images(grids, [0] * len(grids), num_groups=1, ranks=self.ranks, merge_size=self.merge_size)
        if spread.fullest > self.max_patches:
            raise ValueError(
                f"{document.num_patches} patches of images and videos put {spread.fullest} on a device, max_patches is "
                f"{self.max_patches}; lower max_pixels or raise max_patches"
            )
