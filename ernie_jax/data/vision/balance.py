"""Images of different sizes spread evenly over devices.

Weights are numbers of patches. Choosing the least possible maximum is NP-hard; longest first onto the emptiest bin is within 4/3 of
it (R. L. Graham, Bounds on multiprocessing timing anomalies, 1969), and exchanges between the fullest bin and others come closer.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

Weights = Sequence[int] | np.ndarray


def assign(weights: Weights, bins: int) -> np.ndarray:
    """The bin of each item, so that the largest sum of a bin is small: never larger than `naive_assignment` gives.

    The same weights give the same assignment. There may be fewer items than bins, or none.

    Args:
      weights: [n] integers, at least 0.
      bins: at least 1.

    Returns:
      int64 [n], in 0..bins-1.

    Raises:
      ValueError: a weight below 0 or not an integer, or no bin.
    """
    items = _checked(weights, bins)
    best = _refine(items, _longest_first(items, bins, len(items)), bins, moves=True)
    naive = naive_assignment(len(items), bins)
    return naive if _maximum(items, naive, bins) < _maximum(items, best, bins) else best


def assign_rows(weights_of_rows: Weights, shards: int) -> np.ndarray:
    """An order of rows whose `shards` equal pieces have nearly equal sums of weights.

    Row `order[i]` goes to place i; place i belongs to shard i // (rows / shards). Rows keep their order within a shard. Where
    the order they have is as good, it is kept.

    Args:
      weights_of_rows: [rows] integers, at least 0: for example the patches of all images of a row.
      shards: at least 1; divides the number of rows.

    Returns:
      int64 [rows], a permutation.

    Raises:
      ValueError: `shards` does not divide the number of rows, or as in `assign`.
    """
    rows = _checked(weights_of_rows, shards)
    if len(rows) % shards:
        raise ValueError(f"{len(rows)} rows do not divide over {shards} shards; change the batch size")
    best = _refine(rows, _longest_first(rows, shards, len(rows) // shards), shards, moves=False)
    naive = naive_assignment(len(rows), shards)
    if _maximum(rows, naive, shards) <= _maximum(rows, best, shards):
        best = naive
    return np.argsort(best, kind="stable")


def naive_assignment(n: int, bins: int) -> np.ndarray:
    """The split without a look at sizes: contiguous runs of equal counts, the first n mod bins runs one longer. int64 [n]."""
    if bins < 1:
        raise ValueError(f"bins is {bins}; expected at least 1")
    counts = n // bins + (np.arange(bins) < n % bins)
    return np.repeat(np.arange(bins, dtype=np.int64), counts)


def imbalance(weights: Weights, assignment: Sequence[int] | np.ndarray, bins: int) -> float:
    """Largest sum of a bin over the mean sum: 1 is perfect, `bins` is all on one. 1.0 where all weights are zero."""
    items = _checked(weights, bins)
    places = np.asarray(assignment, np.int64)
    if places.shape != items.shape or (len(places) and not 0 <= places.min() <= places.max() < bins):
        raise ValueError(f"the assignment must give each of {len(items)} items a bin in 0..{bins - 1}")
    total = int(items.sum())
    return _maximum(items, places, bins) * bins / total if total else 1.0


def _checked(weights: Weights, bins: int) -> np.ndarray:
    if bins < 1:
        raise ValueError(f"bins is {bins}; expected at least 1")
    items = np.asarray(weights)
    if not items.size:
        return np.zeros(0, np.int64)
    if items.ndim != 1 or not np.issubdtype(items.dtype, np.integer) or items.min() < 0:
        raise ValueError(f"weights must be a list of integers, at least 0 each; got {np.array2string(items, threshold=8)}")
    return items.astype(np.int64)


def _loads(items: np.ndarray, places: np.ndarray, bins: int) -> np.ndarray:
    loads = np.zeros(bins, np.int64)
    np.add.at(loads, places, items)
    return loads


def _maximum(items: np.ndarray, places: np.ndarray, bins: int) -> int:
    return int(_loads(items, places, bins).max())


def _longest_first(items: np.ndarray, bins: int, capacity: int) -> np.ndarray:
    """Each item, the largest first, onto the bin with the least so far that still has room; ties go to the first bin."""
    places = np.zeros(len(items), np.int64)
    heap = [(0, index, 0) for index in range(bins)]
    for item in np.argsort(-items, kind="stable").tolist():
        load, index, count = heapq.heappop(heap)
        places[item] = index
        if count + 1 < capacity:
            heapq.heappush(heap, (load + int(items[item]), index, count + 1))
    return places


def _refine(items: np.ndarray, places: np.ndarray, bins: int, *, moves: bool) -> np.ndarray:
    """Exchanges an item of the fullest bin for a lighter one of another (or, with `moves`, for nothing) while that helps.

    Each step takes the exchange after which the fuller of the two bins is least full; it ends when no exchange lowers the
    fullest bin, or after one step an item.
    """
    places = places.copy()
    lower_bound = max(-(-int(items.sum()) // bins), int(items.max(initial=0)))
    # A move is an exchange for one of these weightless items, one a bin.
    weights = np.concatenate([items, np.zeros(bins if moves else 0, np.int64)])
    homes = np.concatenate([places, np.arange(bins if moves else 0)])
    loads = _loads(items, places, bins)
    for _ in range(len(items)):
        fullest = int(loads.argmax())
        if loads[fullest] <= lower_bound:
            break
        own = np.flatnonzero(homes[: len(items)] == fullest)
        own = own[np.argsort(weights[own], kind="stable")]
        others = np.flatnonzero(homes != fullest)
        if not len(others):
            break
        gap = loads[fullest] - loads[homes[others]]
        # The best partner of an item differs from it by half the gap: one of the two own items next to that weight.
        after = np.searchsorted(weights[own], weights[others] + gap / 2)
        candidates = np.stack([np.maximum(after - 1, 0), np.minimum(after, len(own) - 1)])
        change = weights[own][candidates] - weights[others]
        fuller = np.maximum(loads[fullest] - change, loads[homes[others]] + change)
        side, other = divmod(int(fuller.argmin()), len(others))
        if fuller[side, other] >= loads[fullest]:
            break
        mine, theirs = int(own[candidates[side, other]]), int(others[other])
        home = int(homes[theirs])
        loads[fullest] -= change[side, other]
        loads[home] += change[side, other]
        homes[mine] = home
        if theirs < len(items):
            homes[theirs] = fullest
    return homes[: len(items)]
