"""Documents into rows: those with images whole, texts cut where a row is full. T tokens of a row."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ernie_jax.data.multimodal.documents import Document
from ernie_jax.data.multimodal.shape import RowLimits
from ernie_jax.data.packing import PACKING_MODES

# More would fill rows better, but a document could wait longer and a saved position would name more documents.
OPEN_ROWS = 8


@dataclass(frozen=True, eq=False)
class Piece:
    """Tokens start..stop of the document that was read at `step`; all of it where it has images."""

    step: int
    document: Document
    start: int
    stop: int


@dataclass
class PackedRow:
    """The pieces of one row in order."""

    pieces: list[Piece] = field(default_factory=list)
    tokens: int = 0
    patches: int = 0

    def put(self, piece: Piece) -> None:
        """Adds a piece at the end."""
        self.pieces.append(piece)
        self.tokens += piece.stop - piece.start
        self.patches += piece.document.num_patches


class RowPacker:
    """Packs documents into rows, with a few rows open at a time.

    A document goes whole into the open row that it fills best, ties to the oldest. Where none takes it, a text fills the fullest
    row to the end and goes on with its rest; a document with images opens a new row, for which the fullest is given out when
    `OPEN_ROWS` are open. A row that is full is given out. Texts alone so give the rows of `Packer`.

    Call `add` with one document, then `next_row` until it gives None, and so on; `flush` at the end.
    """

    def __init__(self, limits: RowLimits, *, packing: str = "greedy") -> None:
        """Starts with no row.

        Args:
          limits: of a row; documents with images must fit (`RowLimits.check`).
          packing: `greedy`, or `none`, which starts each document in a row of its own.

        Raises:
          ValueError: an unknown packing.
        """
        if packing not in PACKING_MODES:
            raise ValueError(f"packing is {packing!r}; expected one of {', '.join(PACKING_MODES)}")
        self._limits = limits
        self._greedy = packing == "greedy"
        self._open: list[PackedRow] = []
        self._ready: deque[PackedRow] = deque()

    def add(self, step: int, document: Document) -> None:
        """Takes the next document, read at `step`."""
        start, length = 0, len(document)
        while start < length:
            row = self._best(length - start, document.num_patches)
            if row is None and not document.media and self._open:
                row = self._fullest()
            if row is None:
                row = self._new_row()
            stop = min(length, start + self._limits.tokens - row.tokens)
            assert stop == length or not document.media
            row.put(Piece(step, document, start, stop))
            start = stop
            if row.tokens == self._limits.tokens or not self._greedy:
                self._give_out(row)

    def next_row(self) -> PackedRow | None:
        """The next finished row, or None when another document is needed first."""
        return self._ready.popleft() if self._ready else None

    def put_back(self, rows: Sequence[PackedRow]) -> None:
        """Rows that are to come next again, in this order."""
        self._ready.extendleft(reversed(rows))

    def flush(self) -> PackedRow | None:
        """The oldest unfinished row, None where there is none left. Call at the end of all documents."""
        assert not self._ready, "flush() before next_row() gave None"
        return self._open.pop(0) if self._open else None

    def _best(self, tokens: int, patches: int) -> PackedRow | None:
        """The open row with the least space left that takes the document whole."""
        limits = self._limits
        fits = [
            row
            for row in self._open
            if row.tokens + tokens <= limits.tokens
            # A row without images takes any: beyond the share there is one document with images.
            and (limits.share is None or not patches or not row.patches or row.patches + patches <= limits.share)
        ]
        return max(fits, key=lambda row: row.tokens, default=None)

    def _fullest(self) -> PackedRow:
        return max(self._open, key=lambda row: row.tokens)

    def _new_row(self) -> PackedRow:
        if len(self._open) == OPEN_ROWS:
            self._give_out(max(self._open, key=self._share))
        self._open.append(PackedRow())
        return self._open[-1]

    def _share(self, row: PackedRow) -> float:
        """How full a row is: of tokens or of patches, whichever leaves less room for a document with images."""
        patches = row.patches / self._limits.share if self._limits.share else 0.0
        return max(row.tokens / self._limits.tokens, patches)

    def _give_out(self, row: PackedRow) -> None:
        # By identity: two rows may be equal.
        self._open = [other for other in self._open if other is not row]
        self._ready.append(row)

    def get_state(self) -> dict[str, Any]:
        """What `set_state` needs: the pieces [step, start, stop] of each row not given out, and sizes of documents."""
        rows = (self._open, self._ready)
        documents = {piece.step: piece.document for group in rows for row in group for piece in row.pieces}
        open_rows, ready = ([[[p.step, p.start, p.stop] for p in row.pieces] for row in group] for group in rows)
        sizes = [[step, len(document), document.num_patches] for step, document in documents.items()]
        return {"open": open_rows, "ready": ready, "documents": sizes}

    def set_state(self, state: Mapping[str, Any], read_again: Callable[[int, int, int], Document]) -> None:
        """Goes on from a state that `get_state` gave.

        Args:
          state: the state.
          read_again: the document of (step, tokens, patches).
        """
        documents = {step: read_again(step, tokens, patches) for step, tokens, patches in state["documents"]}

        def row_of(pieces: Sequence[Sequence[int]]) -> PackedRow:
            row = PackedRow()
            for step, start, stop in pieces:
                row.put(Piece(step, documents[step], start, stop))
            return row

        self._open = [row_of(pieces) for pieces in state["open"]]
        self._ready = deque(row_of(pieces) for pieces in state["ready"])
