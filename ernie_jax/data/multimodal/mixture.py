"""Which source and which of its records a host reads when, for sources mixed by weights."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from ernie_jax.data.order import RecordOrder, permuted

# Shares that no block of this many documents has exactly are taken to the nearest thousandth.
_LARGEST_BLOCK = 1000
_ROUNDS = 6
# Tells the keys of the mixture from those of the records' order, which are made of seed and epoch.
_PURPOSE = 0x6D6978


def block_counts(weights: Sequence[float]) -> tuple[int, ...]:
    """Documents of each source in one block: (7, 3) for the weights 0.7 and 0.3.

    The smallest block that has the shares exactly, of at most 1000 documents; where there is none, 1000 documents with the shares
    to the nearest thousandth.

    Raises:
      ValueError: no weight, one that is not a positive number, or one with less than a thousandth of the sum.
    """
    if not weights or not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ValueError(f"the weights of the sources are {list(weights)}; expected a positive number for each")
    given = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(given) for weight in given]
    size = math.lcm(*(share.denominator for share in shares))
    if size <= _LARGEST_BLOCK:
        return tuple(int(share * size) for share in shares)
    counts = [math.floor(share * _LARGEST_BLOCK) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i] * _LARGEST_BLOCK)
    for index in by_remainder[: _LARGEST_BLOCK - sum(counts)]:
        counts[index] += 1
    if min(counts) == 0:
        raise ValueError(f"the weights of the sources are {list(weights)}; a source needs at least a thousandth of their sum")
    return tuple(counts)


class Mixture:
    """The records that one host reads, by its own step; nothing is stored, every step is computed.

    Steps fall into blocks of equal size. Each block has exactly `block_counts` documents of every source, in an order permuted
    anew from the seed and the block; so the weights are exact after each block, counted in documents. Each source is read in the
    order of its own `RecordOrder`, and begins again where it ends, whatever the others do. One source alone is its `RecordOrder`.
    """

    def __init__(self, orders: Sequence[RecordOrder], weights: Sequence[float]) -> None:
        """Puts the orders together.

        Args:
          orders: of each source, for the same host and seed.
          weights: of each source; their sum does not matter.

        Raises:
          ValueError: see `block_counts`.
        """
        assert len(orders) == len(weights)
        self.counts = block_counts(weights)
        self._orders = tuple(orders)
        self._size = sum(self.counts)
        self._slots = [(source, local) for source, count in enumerate(self.counts) for local in range(count)]
        self._order_of_block = functools.lru_cache(maxsize=4)(self._permuted_block)

    @property
    def steps_per_pass(self) -> int:
        """After so many steps every source has been read through at least once."""
        rounds = [-(-order.records_per_epoch // count) for order, count in zip(self._orders, self.counts, strict=True)]
        return max(rounds) * self._size

    def record(self, step: int) -> tuple[int, int]:
        """(source, index of its record) at this host's `step`, from 0."""
        block, place = divmod(step, self._size)
        source, local = self._order_of_block(block)[place]
        return source, self._orders[source].record(block * self.counts[source] + local)

    def _permuted_block(self, block: int) -> list[tuple[int, int]]:
        """The source of each place of a block, and which of its documents in the block it is, counted in the order of reading."""
        first = self._orders[0]
        entropy = [first.seed, block, first.process_index, _PURPOSE]
        keys = tuple(int(key) for key in np.random.SeedSequence(entropy).generate_state(_ROUNDS, np.uint64))
        sources = [self._slots[permuted(place, self._size, keys)][0] for place in range(self._size)]
        read = [0] * len(self.counts)
        order = []
        for source in sources:
            order.append((source, read[source]))
            read[source] += 1
        return order
