"""Held-out batches: finite, the same each time, on any number of hosts. B rows of this host, T tokens of a row."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator

from ernie_jax.data.documents import TokenizedDocuments
from ernie_jax.data.order import RecordOrder, host_rows
from ernie_jax.data.packing import Packer, Row, stack_rows
from ernie_jax.data.sources import Paths, open_records
from ernie_jax.data.tokenizer import Tokenizer


class HeldoutBatches(Iterable[Row]):
    """Held-out batches of this host; each iteration gives the same ones, see `heldout_batches`."""

    def __init__(
        self,
        documents: TokenizedDocuments,
        make_packer: Callable[[], Packer],
        *,
        batch_size: int,
        host: slice,
        max_batches: int | None,
    ) -> None:
        """Puts the parts together.

        Args:
          documents: all held-out documents, once, the same on every host.
          make_packer: an empty packer.
          batch_size: rows over all hosts.
          host: which of them are this host's.
          max_batches: most batches given, None for all.
        """
        self._documents = documents
        self._make_packer = make_packer
        self._batch_size = batch_size
        self._host = host
        self._max_batches = max_batches

    def __iter__(self) -> Iterator[Row]:
        packer = self._make_packer()
        rows: list[Row] = []
        given = 0
        for row in self._rows(packer):
            rows.append(row)
            if len(rows) == self._batch_size:
                yield stack_rows(rows[self._host])
                rows, given = [], given + 1
                if given == self._max_batches:
                    return
        if rows:
            rows += [packer.empty_row() for _ in range(self._batch_size - len(rows))]
            yield stack_rows(rows[self._host])
        elif not given:
            raise ValueError("the held-out files gave no token: all records are empty or skipped; check paths and text_field")

    def _rows(self, packer: Packer) -> Iterator[Row]:
        """All rows of all hosts."""
        for step in range(len(self._documents)):
            (ids,) = self._documents[step]
            if ids is None or not len(ids):
                continue
            packer.add(ids)
            while (row := packer.next_row()) is not None:
                yield row
        if (row := packer.flush()) is not None:
            yield row


def heldout_batches(
    *,
    paths: Paths,
    tokenizer: Tokenizer,
    seq_len: int,
    batch_size: int,
    max_batches: int | None,
    format: str = "auto",
    text_field: str = "text",
    packing: str = "greedy",
    on_bad_record: str = "error",
    seed: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> HeldoutBatches:
    """Batches to evaluate on, with the keys and shapes of the training batches: int32 [B, T].

    Every host packs the same rows and takes its share of each batch, so all hosts have the same number of batches and the rows do
    not depend on the number of hosts. The last batch is filled with rows whose labels are all -100. Documents come in one fixed
    permutation, so that a few batches are a sample of all files.

    Args:
      paths, format, text_field, on_bad_record: the files, as in `make_pipeline`.
      tokenizer, seq_len, packing: the rows, as in `make_pipeline`.
      batch_size: rows of a batch over all hosts.
      max_batches: most batches, None for all.
      seed: of the permutation.
      process_index, process_count: this host among all.

    Raises:
      ValueError: an argument is out of range or a pattern matches nothing; when iterated, a bad record or no token at all.
    """
    if max_batches is not None and max_batches < 1:
        raise ValueError(f"max_batches is {max_batches}; expected 1 or more, or None for all")
    host = host_rows(batch_size, process_index, process_count)
    make_packer = functools.partial(
        Packer, seq_len=seq_len, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, packing=packing
    )
    make_packer()  # refuses wrong arguments here, not at the first evaluation
    records = open_records(paths, format=format, text_field=text_field)
    order = RecordOrder(num_records=len(records), seed=seed)
    documents = TokenizedDocuments(records, order, tokenizer, on_bad_record=on_bad_record, epochs=1)
    return HeldoutBatches(documents, make_packer, batch_size=batch_size, host=host, max_batches=max_batches)
