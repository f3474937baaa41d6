"""Which record a host reads when: a permutation of all records for each epoch, dealt out to the hosts."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

_ROUNDS = 6
_MASK = 2**64 - 1


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
        if self.num_records < self.process_count:
            raise ValueError(
                f"{self.num_records} records cannot be shared by {self.process_count} processes; expected one each at least"
            )

    @property
    def records_per_epoch(self) -> int:
        """Records this host reads in an epoch."""
        return len(range(self.process_index, self.num_records, self.process_count))

    def record(self, step: int) -> int:
        """Index of the record this host reads at its own `step`, counted from 0 over all epochs."""
        epoch, local = divmod(step, self.records_per_epoch)
        place = self.process_index + local * self.process_count
        return permuted(place, self.num_records, _round_keys(self.seed, epoch)) if self.shuffle else place


@functools.lru_cache(maxsize=8)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    """Keys of one epoch's permutation. Hashed together: with the sum, epoch 1 of seed 0 would be epoch 0 of seed 1."""
    return tuple(int(key) for key in np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint64))


def permuted(index: int, size: int, keys: tuple[int, ...]) -> int:
    """Where a keyed pseudorandom permutation of `range(size)` takes `index`, in time and memory that do not grow with `size`.

    A Feistel network permutes the smallest 2^(2k) numbers that hold the range; a result outside the range goes through again, which
    stays a permutation (cycle walking: Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002).
    """
    half_bits = ((size - 1).bit_length() + 1) // 2
    half_mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & half_mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & half_mask)
        index = left << half_bits | right
        if index < size:
            return index


def _mix(value: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): every input bit changes every output bit."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


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
