"""Documents to rows of fixed length. T tokens of a row, S segments of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

IGNORE = -100
PACKING_MODES = ("greedy", "none")
Row = dict[str, np.ndarray]


class Packer:
    """Cuts documents into rows of T tokens; one that does not fit goes on in the next row.

    A row is a dictionary of int32 [T]:
      input_ids: the tokens, the padding id behind them.
      labels: the next token of the same document; -100 at a document's last token and at padding. Where a row ends inside a
        document, the label there is the first token of the next row.
      segment_ids: 1, 2, ... for the pieces of documents in the row, 0 at padding.
      position_ids: 0, 1, ... within each piece, 0 at padding.

    Call `add` with one document, then `next_row` until it gives None, and so on; `flush` at the end.
    """

    def __init__(self, *, seq_len: int, eos_token_id: int, pad_token_id: int, packing: str = "greedy") -> None:
        """Starts with an empty row.

        Args:
          seq_len: T, at least 2.
          eos_token_id: appended to every document.
          pad_token_id: at padding.
          packing: `greedy` fills each row with as many documents as it takes; `none` starts each document in a row of its own.

        Raises:
          ValueError: `seq_len` below 2 or an unknown packing.
        """
        if seq_len < 2:
            raise ValueError(f"seq_len is {seq_len}; a row needs at least 2 tokens to have a label")
        if packing not in PACKING_MODES:
            raise ValueError(f"packing is {packing!r}; expected one of {', '.join(PACKING_MODES)}")
        self._seq_len = seq_len
        self._eos = eos_token_id
        self._pad = pad_token_id
        self._greedy = packing == "greedy"
        self._pieces: list[np.ndarray] = []  # of the open row; each but the one that fills the row ends its document
        self._filled = 0
        self._rest = np.zeros(0, np.int32)  # of the current document, not yet in a row

    def add(self, ids: Sequence[int] | np.ndarray) -> None:
        """Takes the next document's tokens, without its end token. An empty document is nothing at all."""
        assert not len(self._rest), "add() before next_row() gave None"
        if len(ids):
            self._rest = np.append(np.asarray(ids, np.int32), np.int32(self._eos))

    def next_row(self) -> Row | None:
        """The next finished row, or None when another document is needed first."""
        if not len(self._rest):
            return None
        space = self._seq_len - self._filled
        piece, self._rest = self._rest[:space], self._rest[space:]
        self._pieces.append(piece)
        self._filled += len(piece)
        if self._filled == self._seq_len or not self._greedy:
            return self._emit()
        return None

    def flush(self) -> Row | None:
        """The half-filled row with padding behind it, or None where the open row is empty. Call at the end of all documents."""
        assert not len(self._rest), "flush() before next_row() gave None"
        return self._emit() if self._pieces else None

    def empty_row(self) -> Row:
        """A row of padding alone, to fill a last batch."""
        return {
            "input_ids": np.full(self._seq_len, self._pad, np.int32),
            "labels": np.full(self._seq_len, IGNORE, np.int32),
            "segment_ids": np.zeros(self._seq_len, np.int32),
            "position_ids": np.zeros(self._seq_len, np.int32),
        }

    def _emit(self) -> Row:
        row = self.empty_row()
        start = 0
        for segment, piece in enumerate(self._pieces, start=1):
            stop = start + len(piece)
            row["input_ids"][start:stop] = piece
            row["labels"][start : stop - 1] = piece[1:]
            row["segment_ids"][start:stop] = segment
            row["position_ids"][start:stop] = np.arange(len(piece), dtype=np.int32)
            start = stop
        if len(self._rest):
            # The row is cut inside a document: its last label is read one token ahead.
            row["labels"][start - 1] = self._rest[0]
        self._pieces, self._filled = [], 0
        return row

    def get_state(self) -> dict[str, Any]:
        """What `set_state` needs: the half-filled row's `pieces` and the `rest` of the current document, int32 arrays."""
        return {"pieces": list(self._pieces), "rest": self._rest}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state that `get_state` gave, its arrays perhaps turned into lists."""
        self._pieces = [np.asarray(piece, np.int32) for piece in state["pieces"]]
        self._filled = sum(map(len, self._pieces))
        self._rest = np.asarray(state["rest"], np.int32)


def stack_rows(rows: Sequence[Row]) -> Row:
    """Rows of [T] to one batch of [rows, T]."""
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]}
