"""From files to training batches whose position can be saved and found again exactly. B rows of this host, T tokens of a row."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import grain
import numpy as np
from grain.experimental import ThreadPrefetchIterDataset

from ernie_jax.data.batches import PackedBatches
from ernie_jax.data.documents import TokenizedDocuments
from ernie_jax.data.fingerprint import data_fingerprint, refuse_changes
from ernie_jax.data.order import RecordOrder, host_rows
from ernie_jax.data.packing import Packer, Row
from ernie_jax.data.sources import Paths, open_records
from ernie_jax.data.tokenizer import Tokenizer

STATE_VERSION = 1
# Documents tokenized ahead of the packing; more threads would wait for each other.
_READ_THREADS = 2
_READ_AHEAD = 16


class Closable(Protocol):
    """What an iterator reads from; it closes it in the end."""

    def close(self) -> None:
        """Closes the files."""
        ...


class _Running:
    """Reading threads and open files, behind the last batch or closed.

    It is apart from `TrainIterator`, so that one dropped without closing, or alive when Python ends, still ends its threads.
    """

    def __init__(self, batches: grain.DatasetIterator[Row], records: Closable) -> None:
        self.batches: grain.DatasetIterator[Row] | None = batches
        self._records = records
        self._last_state: dict[str, Any] = {}

    def position(self) -> dict[str, Any]:
        return self._last_state if self.batches is None else self.batches.get_state()

    def close(self) -> None:
        if self.batches is not None:
            self._last_state = self.batches.get_state()
            self.batches.close()
            self.batches = None
            self._records.close()


class TrainIterator(Iterator[Row]):
    """Batches of this host, endless or for some epochs; see `make_pipeline` and `make_multimodal_pipeline`.

    Close it, or use it in a `with` statement.
    """

    def __init__(self, batches: grain.DatasetIterator[Row], records: Closable, fingerprint: Mapping[str, Any]) -> None:
        """Takes over the batches and the records, and closes them in the end."""
        self._running = _Running(batches, records)
        self._fingerprint = dict(fingerprint)
        self._failure: Exception | None = None
        self._finalizer = weakref.finalize(self, self._running.close)

    def _batches(self) -> grain.DatasetIterator[Row]:
        if self._running.batches is None:
            raise ValueError("the data iterator is closed; make a new one and set its state")
        return self._running.batches

    def __next__(self) -> Row:
        """The next batch: int32 [B, T] `input_ids`, `labels`, `segment_ids`, `position_ids`, or as `make_multimodal_pipeline` says.

        Raises:
          ValueError: a bad record (file and line are named), an epoch without a token, or the iterator is closed.
          StopIteration: after the last epoch.
        """
        batches = self._batches()
        if self._failure is not None:
            # Going on would silently leave out the record that failed.
            raise self._failure
        try:
            return next(batches)
        except StopIteration:
            raise
        except Exception as error:
            self._failure = error
            raise

    def get_state(self) -> dict[str, Any]:
        """Position behind the last batch given out, as JSON-serialisable values; each host has its own.

        Batches prepared ahead are not part of it: they come again after `set_state`.
        """
        return {"version": STATE_VERSION, "fingerprint": self._fingerprint, "position": _jsonable(self._running.position())}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes to a position that `get_state` gave, on this or another iterator of the same arguments.

        Raises:
          ValueError: the state is of other files, another tokenizer, number of hosts, batch shape, seed or packing; all differences
            are listed.
        """
        batches = self._batches()
        if state.get("version") != STATE_VERSION:
            raise ValueError(f"the data state has version {state.get('version')!r}; this code reads version {STATE_VERSION}")
        missing = [key for key in ("fingerprint", "position") if key not in state]
        if missing:
            raise ValueError(f"the data state lacks {', '.join(missing)}; expected what get_state() gave")
        refuse_changes(state["fingerprint"], self._fingerprint)
        try:
            batches.set_state(dict(state["position"]))
        except IndexError as error:
            self._failure = ValueError(f"the saved data position lies behind the end of the data; raise epochs ({error})")
            raise self._failure from error
        self._failure = None

    @property
    def skipped_records(self) -> int:
        """Bad records this host passed over up to the last batch given out; one is counted again in each epoch."""
        return int(self._running.position()["skipped"])

    def close(self) -> None:
        """Ends the reading threads and closes the files; the state can still be read. Closing twice is fine."""
        self._finalizer()

    def __enter__(self) -> TrainIterator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def make_pipeline(
    *,
    paths: Paths,
    tokenizer: Tokenizer,
    seq_len: int,
    batch_size: int,
    seed: int,
    format: str = "auto",
    text_field: str = "text",
    packing: str = "greedy",
    on_bad_record: str = "error",
    shuffle: bool = True,
    epochs: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
    prefetch: int = 2,
) -> TrainIterator:
    """Training batches of this host: files -> permuted records -> tokens -> packed rows -> batches, prepared ahead in threads.

    The batches depend on the arguments and the files alone; `get_state` and `set_state` continue them exactly, from any batch.

    Args:
      paths: a path or glob, or several; local or any `etils.epath` path.
      tokenizer: its end token closes each document.
      seq_len: T, tokens of a row.
      batch_size: rows of a batch over all hosts.
      seed: of the permutations.
      format: `text`, `jsonl`, `parquet`, or `auto` by suffix.
      text_field: field or column with the text.
      packing: `greedy` fills rows with several documents, `none` starts each document in its own row.
      on_bad_record: `error`, or `skip` and count in `skipped_records`.
      shuffle: permute the records anew in each epoch, from (seed, epoch).
      epochs: passes over the data, None for no end. The last batch is filled with rows whose labels are all -100. Hosts may have
        different numbers of batches then, so a run on several hosts must end by its number of steps.
      process_index, process_count: this host among all. Place i of the permuted records goes to host `i % process_count`.
      prefetch: batches prepared ahead; 0 does all work in `__next__`.

    Raises:
      ValueError: an argument is out of range, a pattern matches nothing, or there are fewer records than hosts.
    """
    host = host_rows(batch_size, process_index, process_count)
    if prefetch < 0:
        raise ValueError(f"prefetch is {prefetch}; expected 0 or more")
    records = open_records(paths, format=format, text_field=text_field)
    order = RecordOrder(
        num_records=len(records), seed=seed, shuffle=shuffle, process_index=process_index, process_count=process_count
    )
    documents = TokenizedDocuments(records, order, tokenizer, on_bad_record=on_bad_record, epochs=epochs)
    make_packer = functools.partial(
        Packer, seq_len=seq_len, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, packing=packing
    )
    make_packer()  # refuses wrong arguments here, not in a thread
    ahead = grain.ReadOptions(num_threads=_READ_THREADS, prefetch_buffer_size=_READ_AHEAD)
    reading = ahead if prefetch else grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    batches = PackedBatches(
        grain.MapDataset.source(documents).to_iter_dataset(reading),
        make_packer,
        rows=host.stop - host.start,
        records_per_epoch=order.records_per_epoch,
    )
    # `format` follows from the files. `on_bad_record` may change: a run that a bad record stopped goes on by skipping it.
    fingerprint = data_fingerprint(
        records.files,
        tokenizer=tokenizer.fingerprint(),
        text_field=text_field,
        seed=seed,
        shuffle=shuffle,
        seq_len=seq_len,
        packing=packing,
        batch_size=batch_size,
        process_index=process_index,
        process_count=process_count,
    )
    return TrainIterator(iter(ThreadPrefetchIterDataset(batches, prefetch_buffer_size=prefetch)), records, fingerprint)
