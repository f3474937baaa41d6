"""Bins with equally many things: counts, the bound of dealing, and that exchanges only help."""

import numpy as np
import pytest

from ernie_jax.moe.packing import bin_weights, deal, longest_first, pack, swap

WEIGHTS = [np.random.default_rng(i).pareto(1.5, size=24) for i in range(10)]


@pytest.mark.parametrize("count", [1, 2, 6, 24])
@pytest.mark.parametrize("way", [deal, longest_first, pack])
def test_every_bin_holds_equally_many(way, count):
    for weights in WEIGHTS:
        np.testing.assert_array_equal(np.bincount(way(weights, count), minlength=count), np.full(count, 24 // count))


@pytest.mark.parametrize("count", [2, 6])
def test_the_fullest_has_at_most_the_mean_and_the_heaviest(count):
    for weights in WEIGHTS:
        dealt, packed = (bin_weights(weights, way(weights, count), count) for way in (deal, pack))
        assert dealt.max() - dealt.min() <= weights.max() + 1e-9
        assert packed.max() <= dealt.max()


def test_longest_first_by_hand():
    # 5 | 4; 4 + 3; both full of two: 5 + 2.
    np.testing.assert_array_equal(longest_first(np.array([5.0, 4.0, 3.0, 2.0]), 2), [0, 1, 1, 0])


def test_no_exchange_is_left_that_helps():
    for weights in WEIGHTS:
        start = np.arange(24) // 4
        bins = swap(weights, start, 6)
        loads = bin_weights(weights, bins, 6)
        assert loads.max() <= bin_weights(weights, start, 6).max()
        for a in np.flatnonzero(bins == loads.argmax()):
            for b in np.flatnonzero(bins != loads.argmax()):
                other = bins.copy()
                other[a], other[b] = bins[b], bins[a]
                new = bin_weights(weights, other, 6)
                assert max(new[bins[a]], new[bins[b]]) >= loads.max() * (1 - 1e-9)


def test_kinds_stay_apart():
    weights, kinds = np.array([4.0, 4.0, 1.0, 1.0, 3.0, 1.0]), np.array([0, 0, 1, 2, 3, 4])
    bins = swap(weights, np.array([0, 1, 0, 1, 1, 0]), 2, kinds)
    assert bins[0] != bins[1]
    assert sorted(bin_weights(weights, bins, 2)) == [6, 8]
