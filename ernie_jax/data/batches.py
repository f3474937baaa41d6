"""Documents packed into rows and stacked to batches, as a stage of a grain pipeline. B rows of this host, T tokens of a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grain

from ernie_jax.data.packing import Packer, Row, stack_rows


class PackedBatches(grain.IterDataset[Row]):
    """Batches of B rows from documents `(ids,)`; the last one is filled with rows of padding."""

    def __init__(
        self, parent: grain.IterDataset[Any], make_packer: Callable[[], Packer], *, rows: int, records_per_epoch: int
    ) -> None:
        """Puts the stage behind the documents.

        Args:
          parent: gives `(ids,)`, ids None for a skipped record.
          make_packer: an empty packer.
          rows: B.
          records_per_epoch: of this host; tells when the data has no token at all, which is an error.
        """
        super().__init__(parent)
        self._make_packer = make_packer
        self._rows = rows
        self._records_per_epoch = records_per_epoch

    def __iter__(self) -> grain.DatasetIterator[Row]:
        return PackedBatchIterator(
            iter(self._parent), self._make_packer(), rows=self._rows, records_per_epoch=self._records_per_epoch
        )


class PackedBatchIterator(grain.DatasetIterator[Row]):
    """The iterator of `PackedBatches`. Its state holds the half-filled row, so it is exact between any two batches."""

    def __init__(self, parent: grain.DatasetIterator[Any], packer: Packer, rows: int, records_per_epoch: int) -> None:
        super().__init__(parent)
        self._packer = packer
        self._rows = rows
        self._records_per_epoch = records_per_epoch
        self._skipped = 0
        self._barren = 0  # records since the last one with tokens

    def __next__(self) -> Row:
        rows: list[Row] = []
        while len(rows) < self._rows:
            row = self._packer.next_row()
            if row is None and not self._add_document():
                row = self._packer.flush()
                if row is None:
                    break
            if row is not None:
                rows.append(row)
        if not rows:
            raise StopIteration
        rows += [self._packer.empty_row() for _ in range(self._rows - len(rows))]
        return stack_rows(rows)

    def _add_document(self) -> bool:
        """Gives the packer the next document; False at the end of all."""
        try:
            (ids,) = next(self._parent)
        except StopIteration:
            self._refuse_barren(self._records_per_epoch)
            return False
        if ids is not None and len(ids):
            self._packer.add(ids)
            self._barren = 0
            return True
        self._skipped += ids is None
        self._barren += 1
        # The only record with tokens may come first in one epoch and last in the next.
        self._refuse_barren(2 * self._records_per_epoch)
        return True

    def _refuse_barren(self, limit: int) -> None:
        """An error instead of an endless search, or of a training run without a batch."""
        if self._barren >= limit:
            raise ValueError(
                f"the last {self._barren} records gave no token, an epoch of this host has {self._records_per_epoch}: "
                f"all are empty or bad ({self._skipped} skipped as bad); check paths, format and text_field"
            )

    def get_state(self) -> dict[str, Any]:
        """Position of the documents, the packer's open row, counts of records without tokens."""
        return {
            "documents": self._parent.get_state(),
            "packer": self._packer.get_state(),
            "skipped": self._skipped,
            "barren": self._barren,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from a state that `get_state` gave."""
        self._parent.set_state(state["documents"])
        self._packer.set_state(state["packer"])
        self._skipped = state["skipped"]
        self._barren = state["barren"]
