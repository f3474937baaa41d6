"""This host's documents by its own step, and documents read again by the step they were first read at."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from ernie_jax.data.documents import ON_BAD_RECORD
from ernie_jax.data.multimodal.documents import Document, DocumentEncoder
from ernie_jax.data.multimodal.records import read_record
from ernie_jax.data.multimodal.shape import RowLimits
from ernie_jax.data.sources import BadRecordError, Records

# (step, document or None where there is nothing to train on, whether it was passed over as bad)
Read = tuple[int, Document | None, bool]


class DocumentReader:
    """`reader[step]` is `(step, document, bad)`; thread-safe. Close it to close the files.

    Attributes:
      files: (name, size in bytes) of all files, source after source.
    """

    def __init__(
        self,
        sources: Sequence[Records],
        record_of: Callable[[int], tuple[int, int]],
        encoder: DocumentEncoder,
        limits: RowLimits,
        *,
        on_bad_record: str = "error",
        length: int | None = None,
    ) -> None:
        """Puts the parts together; nothing is read yet.

        Args:
          sources: the records of each.
          record_of: (source, record) of a step.
          encoder: makes the documents.
          limits: what a row takes; a document beyond them is a bad record.
          on_bad_record: `error` or `skip`.
          length: number of steps, None for no end.

        Raises:
          ValueError: an unknown `on_bad_record`.
        """
        if on_bad_record not in ON_BAD_RECORD:
            raise ValueError(f"on_bad_record is {on_bad_record!r}; expected one of {', '.join(ON_BAD_RECORD)}")
        self._sources, self._record_of = tuple(sources), record_of
        self._encoder, self._limits = encoder, limits
        self._skip = on_bad_record == "skip"
        self._length = sys.maxsize if length is None else length
        self.files = [
            (f"source {number}: {name}", size) for number, records in enumerate(self._sources) for name, size in records.files
        ]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, step: int) -> Read:
        try:
            return step, self.read(step), False
        except BadRecordError as error:
            if self._skip:
                return step, None, True
            raise BadRecordError(f"{error}. Repair it, or set on_bad_record='skip' to count such records and go on") from error

    def read(self, step: int) -> Document | None:
        """The document, None for an empty one. Raises BadRecordError."""
        source, index = self._record_of(step)
        record = read_record(self._sources[source], index)
        document = self._encoder(record)
        if document is not None:
            try:
                self._limits.check(document)
            except ValueError as error:
                raise BadRecordError(f"{record.where}: {error}") from error
        return document

    def read_again(self, step: int, tokens: int, patches: int) -> Document:
        """A document that a saved position names by its step and its size.

        Raises:
          ValueError: it is not there any more, or has another size.
        """
        try:
            document = self.read(step)
        except BadRecordError as error:
            raise ValueError(f"the saved data position needs a document that cannot be read any more: {error}") from error
        found = (0, 0) if document is None else (len(document), document.num_patches)
        if document is None or found != (tokens, patches):
            where = read_record(*self._place(step)).where or "a text file"
            raise ValueError(
                f"the saved data position needs the document of {where} with {tokens} tokens and {patches} patches; now it has "
                f"{found[0]} and {found[1]}. Restore the files, or start the data anew without the saved position"
            )
        return document

    def _place(self, step: int) -> tuple[Records, int]:
        source, index = self._record_of(step)
        return self._sources[source], index

    def close(self) -> None:
        """Closes the files."""
        for records in self._sources:
            records.close()
