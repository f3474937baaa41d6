"""Documents packed into rows and assembled to batches, as a stage of a grain pipeline. B rows of this host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grain

from ernie_jax.data.multimodal.assembly import take
from ernie_jax.data.multimodal.packing import PackedRow, RowPacker
from ernie_jax.data.multimodal.reader import DocumentReader
from ernie_jax.data.packing import Row

Fits = Callable[[Sequence[PackedRow]], bool]
Assemble = Callable[[Sequence[PackedRow]], Row]


class MultimodalBatches(grain.IterDataset[Row]):
    """Endless batches from the `(step, document, bad)` of a reader."""

    def __init__(
        self,
        parent: grain.IterDataset[Any],
        reader: DocumentReader,
        make_packer: Callable[[], RowPacker],
        fits: Fits,
        assemble: Assemble,
        *,
        rows: int,
        steps_per_pass: int,
    ) -> None:
        """Puts the stage behind the documents.

        Args:
          parent: the documents of `reader` in order.
          reader: reads those again that a position names.
          make_packer: an empty packer.
          fits: whether rows can be one batch; those that cannot come in the next.
          assemble: makes a batch of rows.
          rows: B.
          steps_per_pass: after which every source was read once; tells when the data has no token at all, which is an error.
        """
        super().__init__(parent)
        self._reader, self._make_packer, self._fits, self._assemble = reader, make_packer, fits, assemble
        self._rows, self._steps_per_pass = rows, steps_per_pass

    def __iter__(self) -> grain.DatasetIterator[Row]:
        return MultimodalBatchIterator(
            iter(self._parent),
            self._reader,
            self._make_packer(),
            self._fits,
            self._assemble,
            rows=self._rows,
            steps_per_pass=self._steps_per_pass,
        )


class MultimodalBatchIterator(grain.DatasetIterator[Row]):
    """The iterator of `MultimodalBatches`. Its state names the documents of unfinished rows and holds none of their contents."""

    def __init__(
        self,
        parent: grain.DatasetIterator[Any],
        reader: DocumentReader,
        packer: RowPacker,
        fits: Fits,
        assemble: Assemble,
        *,
        rows: int,
        steps_per_pass: int,
    ) -> None:
        super().__init__(parent)
        self._reader, self._packer, self._fits, self._assemble = reader, packer, fits, assemble
        self._rows, self._steps_per_pass = rows, steps_per_pass
        self._skipped = 0
        self._barren = 0  # records since the last one with tokens

    def __next__(self) -> Row:
        rows: list[PackedRow] = []
        while len(rows) < self._rows:
            row = self._packer.next_row()
            if row is None:
                self._add_document()
            else:
                rows.append(row)
        taken, left = take(rows, self._fits)
        self._packer.put_back(left)
        return self._assemble(taken)

    def _add_document(self) -> None:
        step, document, bad = next(self._parent)
        if document is not None:
            self._packer.add(step, document)
            self._barren = 0
            return
        self._skipped += bad
        self._barren += 1
        # The only record with tokens may come first in one pass and last in the next.
        if self._barren >= 2 * self._steps_per_pass:
            raise ValueError(
                f"the last {self._barren} records gave no token, a pass over all sources has {self._steps_per_pass}: "
                f"all are empty or bad ({self._skipped} skipped as bad); check the paths, format and text_field"
            )

    def get_state(self) -> dict[str, Any]:
        """Position of the documents, which of them are in unfinished rows, counts of records without tokens."""
        return {
            "documents": self._parent.get_state(),
            "packer": self._packer.get_state(),
            "skipped": self._skipped,
            "barren": self._barren,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from a state that `get_state` gave; reads the documents of unfinished rows again."""
        self._packer.set_state(state["packer"], self._reader.read_again)
        self._parent.set_state(state["documents"])
        self._skipped = state["skipped"]
        self._barren = state["barren"]
