"""Which record a host reads when: a permutation of all records for each epoch, dealt out to the hosts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from grain.experimental import index_shuffle

_ROUNDS = 4
_MAX_RECORDS = 2**32


@dataclass(frozen=True, kw_only=True)
class RecordOrder:
    """The order in which one host of several reads the records.

    In every epoch all records are permuted anew, from the seed and the epoch alone, and the record at place i of the permutation
    goes to host `i % process_count`: each record is read once an epoch by exactly one host. Nothing is stored: a place is computed.
    Where the records do not divide evenly the later hosts have one less, and begin their next epoch a record earlier.

    Attributes:
      num_records: of all hosts.
      seed: 0 or more.
      shuffle: False keeps the order of the files in every epoch.
      process_index, process_count: this host among all.
    """

    num_records: int
    seed: int = 0
    shuffle: bool = True
    process_index: int = 0
    process_count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.process_index < self.process_count:
            raise ValueError(f"process_index is {self.process_index}; expected 0 to {self.process_count - 1} (process_count - 1)")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; expected 0 or more")
        if not self.process_count <= self.num_records < _MAX_RECORDS:
            raise ValueError(
                f"{self.num_records} records cannot be shared by {self.process_count} processes; expected one each at least, "
                f"and fewer than {_MAX_RECORDS}"
            )

    @property
    def records_per_epoch(self) -> int:
        """Records this host reads in an epoch."""
        return len(range(self.process_index, self.num_records, self.process_count))

    def record(self, step: int) -> int:
        """Index of the record this host reads at its own `step`, counted from 0 over all epochs."""
        epoch, local = divmod(step, self.records_per_epoch)
        place = self.process_index + local * self.process_count
        if not self.shuffle or self.num_records == 1:
            return place
        # Seed and epoch are hashed together: with their sum, epoch 1 of seed 0 would be epoch 0 of seed 1.
        key = int(np.random.SeedSequence([self.seed, epoch]).generate_state(1)[0])
        return int(index_shuffle(place, max_index=self.num_records - 1, seed=key, rounds=_ROUNDS))


def host_rows(batch_size: int, process_index: int, process_count: int) -> slice:
    """Which rows of a global batch are this host's; ValueError where they do not divide evenly."""
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index is {process_index}; expected 0 to {process_count - 1} (process_count - 1)")
    if batch_size < 1 or batch_size % process_count:
        raise ValueError(
            f"batch_size {batch_size} does not divide evenly among {process_count} processes; "
            f"give a positive multiple of process_count, for example {max(1, -(-batch_size // process_count)) * process_count}"
        )
    rows = batch_size // process_count
    return slice(process_index * rows, (process_index + 1) * rows)
