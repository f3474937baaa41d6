import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ernie_jax.data.vision import assign, assign_rows, imbalance, naive_assignment

lists = st.lists(st.integers(0, 60), max_size=40)


def largest(weights, assignment, bins):
    sums = [0] * bins
    for weight, place in zip(weights, assignment, strict=True):
        sums[place] += weight
    return max(sums)


def test_longest_first_alone_would_miss_this_one():
    # Longest first gives {5, 3, 3} and {4, 3}: 11. An exchange gives 9 each.
    weights = [5, 4, 3, 3, 3]
    assert largest(weights, assign(weights, 2), 2) == 9
    assert imbalance(weights, assign(weights, 2), 2) == 1.0


def test_one_big_image_among_small_ones():
    weights = [4000] + [100] * 24
    assert sorted(np.bincount(assign(weights, 4), weights, 4)) == [800, 800, 800, 4000]


def test_shapes_at_the_edges():
    assert assign([], 3).tolist() == [] and assign([], 3).dtype == np.int64
    assert sorted(assign([7, 8], 5).tolist()) in ([0, 1],)
    assert assign([3, 4], 1).tolist() == [0, 0]
    assert assign_rows([], 4).tolist() == []
    assert imbalance([], [], 3) == 1.0
    assert imbalance([0, 0], [0, 0], 2) == 1.0


def test_imbalance_by_hand():
    assert imbalance([1, 2, 3], [0, 0, 1], 2) == 1.0
    assert imbalance([4, 2], [0, 0], 2) == 2.0
    assert imbalance([4, 2, 3], [0, 1, 2], 3) == pytest.approx(4 / 3)


def test_naive_split():
    assert naive_assignment(7, 3).tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert naive_assignment(2, 4).tolist() == [0, 1]


@given(weights=lists, bins=st.integers(1, 9))
@settings(deadline=None)
def test_every_item_has_a_bin_and_the_maximum_is_bounded(weights, bins):
    assignment = assign(weights, bins)
    assert assignment.shape == (len(weights),)
    assert all(0 <= place < bins for place in assignment)
    assert np.array_equal(assignment, assign(weights, bins))
    if weights:
        found = largest(weights, assignment, bins)
        assert found <= largest(weights, naive_assignment(len(weights), bins), bins)
        # Any list schedule: the last item of the fullest bin was put where there was least.
        assert found * bins <= sum(weights) + (bins - 1) * max(weights)
        assert imbalance(weights, assignment, bins) == pytest.approx(found * bins / sum(weights) if sum(weights) else 1.0)


@given(weights=st.lists(st.integers(1, 30), min_size=1, max_size=7), bins=st.integers(1, 3))
@settings(deadline=None, max_examples=60)
def test_within_four_thirds_of_the_best_there_is(weights, bins):
    best = min(largest(weights, places, bins) for places in itertools.product(range(bins), repeat=len(weights)))
    assert 3 * largest(weights, assign(weights, bins), bins) <= 4 * best


@given(weights=lists, shards=st.integers(1, 6))
@settings(deadline=None)
def test_rows_are_a_permutation_into_equal_shards_never_worse_than_as_they_come(weights, shards):
    rows = weights[: len(weights) // shards * shards]
    order = assign_rows(rows, shards)
    assert sorted(order.tolist()) == list(range(len(rows)))
    assert np.array_equal(order, assign_rows(rows, shards))
    if rows:
        pieces = np.array(rows)[order].reshape(shards, -1)
        assert pieces.sum(1).max() <= np.array(rows).reshape(shards, -1).sum(1).max()
        assert all(piece.tolist() == sorted(piece.tolist()) for piece in order.reshape(shards, -1))


def test_rows_by_hand():
    # Two heavy rows side by side go to two shards; rows that are balanced stay where they are.
    order = assign_rows([100, 90, 1, 2], 2)
    assert np.array([100, 90, 1, 2])[order].reshape(2, 2).sum(1).max() == 101
    assert assign_rows([5, 5, 5, 5], 2).tolist() == [0, 1, 2, 3]
    assert assign_rows([0] * 6, 3).tolist() == list(range(6))


def test_pictures_of_many_sizes_come_within_a_tenth():
    # Patches of images between 2x2 and 20x20 merge blocks, in runs of one kind, as a data set has them.
    generator = np.random.default_rng(0)
    sides = np.sort(generator.integers(2, 21, 64))
    weights = 4 * sides * generator.integers(2, 21, 64)
    assert imbalance(weights, naive_assignment(64, 8), 8) > 1.5
    assert imbalance(weights, assign(weights, 8), 8) < 1.01
    rows = assign_rows(weights, 8)
    assert imbalance(weights[rows], naive_assignment(64, 8), 8) < 1.05


def test_many_images_take_no_time():
    weights = np.random.default_rng(0).integers(4, 6177, 4096)
    assert imbalance(weights, assign(weights, 512), 512) < 1.05


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: assign([1], 0), "bins is 0"),
        (lambda: assign([-1], 2), "at least 0 each"),
        (lambda: assign([0.5], 2), "must be a list of integers"),
        (lambda: assign_rows([1, 2, 3], 2), "3 rows do not divide over 2 shards"),
        (lambda: imbalance([1], [2], 2), r"a bin in 0\.\.1"),
        (lambda: imbalance([1, 2], [0], 2), "each of 2 items"),
        (lambda: naive_assignment(3, 0), "bins is 0"),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
