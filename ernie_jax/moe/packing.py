"""Things with weights into bins that all hold equally many, so that the fullest weighs little. n things, G bins, n / G a bin.

Plain numpy, and the same answer everywhere: every process of a run plans for itself. Ties go to the lowest number.
"""

from __future__ import annotations

import numpy as np

# Smaller differences of loads are rounding.
_ROUNDING = 1e-12


def bin_weights(weights: np.ndarray, bins: np.ndarray, count: int) -> np.ndarray:
    """[G] weight of each bin, from the weight [n] and the bin [n] of each thing."""
    return np.bincount(bins, weights=weights, minlength=count)


def deal(weights: np.ndarray, count: int) -> np.ndarray:
    """The heaviest first, one to each bin in turn: [n] bins.

    A bin's thing of one round weighs at most what another bin's weighed the round before, so two bins differ by at most the
    heaviest thing: the fullest weighs at most the mean and that. Neighbours of equal weight go to different bins.
    """
    bins = np.empty(len(weights), np.int64)
    bins[np.argsort(-weights, kind="stable")] = np.arange(len(weights)) % count
    return bins


def longest_first(weights: np.ndarray, count: int) -> np.ndarray:
    """The heaviest first, each to the lightest bin that has room (longest processing time first): [n] bins."""
    room, total = np.full(count, len(weights) // count), np.zeros(count)
    bins = np.empty(len(weights), np.int64)
    for thing in np.argsort(-weights, kind="stable"):
        best = int(np.argmin(np.where(room > 0, total, np.inf)))
        bins[thing] = best
        total[best] += weights[thing]
        room[best] -= 1
    return bins


def pack(weights: np.ndarray, count: int) -> np.ndarray:
    """The better of `longest_first` and `deal`, so with the bound of `deal`: [n] bins."""
    choices = longest_first(weights, count), deal(weights, count)
    return min(choices, key=lambda bins: float(bin_weights(weights, bins, count).max()))


def swap(weights: np.ndarray, bins: np.ndarray, count: int, kinds: np.ndarray | None = None) -> np.ndarray:
    """Exchanges a thing of the fullest bin for one of another bin, the pair that helps most, until no pair helps.

    Args:
      weights: [n].
      bins: [n], where they are.
      count: G.
      kinds: [n]; no bin is given two things of one kind.

    Returns:
      [n] bins; the fullest weighs no more than before.
    """
    bins, total = bins.copy(), bin_weights(weights, bins, count)
    while True:
        full = int(np.argmax(total))
        mine, others = np.flatnonzero(bins == full), np.flatnonzero(bins != full)
        if not len(others):
            return bins
        moved = weights[mine][:, None] - weights[others][None, :]
        fuller = np.maximum(total[full] - moved, total[bins[others]][None, :] + moved)
        if kinds is not None:
            fuller = np.where(_keeps_apart(kinds, bins, mine, others, count), fuller, np.inf)
        best = int(np.argmin(fuller))
        if not fuller.flat[best] < total[full] * (1 - _ROUNDING):
            return bins
        one, other = mine[best // len(others)], others[best % len(others)]
        bins[one], bins[other] = bins[other], bins[one]
        total = bin_weights(weights, bins, count)


def _keeps_apart(kinds: np.ndarray, bins: np.ndarray, mine: np.ndarray, others: np.ndarray, count: int) -> np.ndarray:
    """[mine, others] bool: neither bin gets a kind that it has; things of one kind have nothing to exchange."""
    has = np.zeros((count, int(kinds.max()) + 1), bool)
    has[bins, kinds] = True
    new_here = ~has[bins[mine[0]], kinds[others]]
    new_there = ~has[bins[others][None, :], kinds[mine][:, None]]
    kept: np.ndarray = new_here[None, :] & new_there
    return kept
