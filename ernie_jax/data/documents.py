"""Records to token ids, in the order in which one host reads them."""

from __future__ import annotations

import sys

import numpy as np

from ernie_jax.data.order import RecordOrder
from ernie_jax.data.sources import BadRecordError, Records
from ernie_jax.data.tokenizer import Tokenizer

ON_BAD_RECORD = ("error", "skip")


class TokenizedDocuments:
    """This host's documents by its own step: `documents[step]` is `(ids,)`.

    `ids` is int32 [tokens], without an end token; empty for an empty document, None for a bad record that is to be skipped.
    It stands in a tuple because grain leaves out elements that are None, and a skipped record has to be counted.
    """

    def __init__(
        self, records: Records, order: RecordOrder, tokenizer: Tokenizer, *, on_bad_record: str = "error", epochs: int | None = None
    ) -> None:
        """Puts the parts together; nothing is read yet.

        Args:
          records: all records of all hosts.
          order: which of them this host reads at which step.
          tokenizer: makes the ids.
          on_bad_record: `error` or `skip`.
          epochs: passes over the data; None for no end.

        Raises:
          ValueError: `on_bad_record` or `epochs` is out of range.
        """
        if on_bad_record not in ON_BAD_RECORD:
            raise ValueError(f"on_bad_record is {on_bad_record!r}; expected one of {', '.join(ON_BAD_RECORD)}")
        if epochs is not None and epochs < 1:
            raise ValueError(f"epochs is {epochs}; expected 1 or more, or None for no end")
        self._records = records
        self._order = order
        self._tokenizer = tokenizer
        self._skip = on_bad_record == "skip"
        self._length = sys.maxsize if epochs is None else epochs * order.records_per_epoch

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, step: int) -> tuple[np.ndarray | None]:
        try:
            text = self._records[self._order.record(step)]
        except BadRecordError as error:
            if self._skip:
                return (None,)
            raise BadRecordError(f"{error}. Repair it, or set on_bad_record='skip' to count such records and go on") from error
        return (np.asarray(self._tokenizer.encode(text), np.int32),)
