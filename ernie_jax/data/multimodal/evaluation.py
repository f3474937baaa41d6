"""Held-out batches with images: finite, the same each time, on any number of hosts. B rows of a batch over all hosts."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ernie_jax.data.multimodal.assembly import fits, take
from ernie_jax.data.multimodal.batches import Assemble
from ernie_jax.data.multimodal.documents import DocumentEncoder
from ernie_jax.data.multimodal.packing import PackedRow, RowPacker
from ernie_jax.data.multimodal.pipeline import batch_assembly
from ernie_jax.data.multimodal.reader import DocumentReader
from ernie_jax.data.multimodal.shape import BatchShape, RowLimits
from ernie_jax.data.order import RecordOrder
from ernie_jax.data.packing import Row
from ernie_jax.data.sources import Paths, open_records


class HeldoutMultimodalBatches(Iterable[Row]):
    """Held-out batches of this host; each iteration gives the same ones, see `heldout_multimodal_batches`."""

    def __init__(
        self,
        reader: DocumentReader,
        limits: RowLimits,
        packing: str,
        assemble: Assemble,
        shape: BatchShape,
        max_batches: int | None,
    ) -> None:
        """Puts the parts together.

        Args:
          reader: all held-out documents, once, the same on every host.
          limits, packing: of the packer.
          assemble: makes a batch of this host's rows.
          shape: of the batches.
          max_batches: most batches given, None for all.
        """
        self._reader, self._limits, self._assemble = reader, limits, assemble
        self._shape, self._max_batches = shape, max_batches
        self._make_packer = functools.partial(RowPacker, limits, packing=packing)
        self._make_packer()  # refuses wrong arguments here, not at the first evaluation

    def __iter__(self) -> Iterator[Row]:
        rows: list[PackedRow] = []
        given = 0
        for row in self._rows(self._make_packer()):
            rows.append(row)
            if len(rows) == self._shape.batch_size:
                taken, rows = take(rows, self._fits)
                yield self._assemble(taken[self._shape.host])
                given += 1
                if given == self._max_batches:
                    return
        while rows and given != self._max_batches:
            taken, rows = take(rows, self._fits)
            yield self._assemble(taken[self._shape.host])
            given += 1
        if not given:
            raise ValueError("the held-out files gave no token: all records are empty or skipped; check paths and text_field")

    def _fits(self, rows: Sequence[PackedRow]) -> bool:
        """Whether the rows of each host fit on its devices: all hosts must leave the same ones to the next batch."""
        shapes = [replace(self._shape, process_index=index) for index in range(self._shape.process_count)]
        return all(fits(rows[shape.host], shape, self._limits) for shape in shapes)

    def _rows(self, packer: RowPacker) -> Iterator[PackedRow]:
        """All rows of all hosts."""
        for number in range(len(self._reader)):
            step, document, _ = self._reader[number]
            if document is None:
                continue
            packer.add(step, document)
            while (row := packer.next_row()) is not None:
                yield row
        while (row := packer.flush()) is not None:
            yield row


def heldout_multimodal_batches(
    *,
    paths: Paths,
    encoder: DocumentEncoder,
    shape: BatchShape,
    max_batches: int | None,
    format: str = "auto",
    text_field: str = "text",
    packing: str = "greedy",
    on_bad_record: str = "error",
    seed: int = 0,
) -> HeldoutMultimodalBatches:
    """Batches to evaluate on, with the arrays of the training batches; conversations and texts may stand in the same files.

    Every host packs the same rows and takes its share of each batch, as in `heldout_batches`; the last batch is filled with rows
    whose labels are all -100. Documents come in one fixed permutation, so that a few batches are a sample of all files.

    Args:
      paths, format, text_field, packing, on_bad_record, encoder, shape: as in `make_multimodal_pipeline`.
      max_batches: most batches, None for all.
      seed: of the permutation.

    Raises:
      ValueError: an argument is out of range or a pattern matches nothing; when iterated, a bad record or no token at all.
    """
    if max_batches is not None and max_batches < 1:
        raise ValueError(f"max_batches is {max_batches}; expected 1 or more, or None for all")
    limits = RowLimits.of(shape, merge_size=encoder.merge_size, largest_unit=encoder.largest_unit)
    records = open_records(paths, format=format, text_field=text_field)
    order = RecordOrder(num_records=len(records), seed=seed)
    reader = DocumentReader(
        [records], lambda step: (0, order.record(step)), encoder, limits, on_bad_record=on_bad_record, length=len(records)
    )
    return HeldoutMultimodalBatches(reader, limits, packing, batch_assembly(encoder, shape), shape, max_batches)
