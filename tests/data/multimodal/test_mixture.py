"""Sources mixed by weights: exact shares, every record of each, the same for the same seed."""

from collections import Counter

import pytest

from ernie_jax.data.multimodal import Mixture, block_counts
from ernie_jax.data.order import RecordOrder


def orders(sizes, seed=0, index=0, count=1):
    return [RecordOrder(num_records=size, seed=seed, process_index=index, process_count=count) for size in sizes]


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ([5.0], (1,)),
        ([2, 2], (1, 1)),
        ([0.7, 0.3], (7, 3)),
        ([1, 2, 5], (1, 2, 5)),
        ([0.1, 0.2, 0.7], (1, 2, 7)),
        # No block of at most 1000 has these: 285.7142857..., 714.2857142...
        ([0.28571428, 0.71428572], (286, 714)),
    ],
)
def test_weights_become_documents_of_a_block(weights, counts):
    assert block_counts(weights) == counts


def test_every_block_has_the_shares_exactly_and_in_another_order():
    mixture = Mixture(orders([13, 29, 7]), [0.5, 0.3, 0.2])
    blocks = [[mixture.record(10 * block + place)[0] for place in range(10)] for block in range(40)]
    assert all(Counter(block) == {0: 5, 1: 3, 2: 2} for block in blocks)
    assert len({tuple(block) for block in blocks}) > 30


def test_each_source_is_read_in_its_own_order_again_and_again():
    own = orders([13, 29, 7], seed=4)
    mixture = Mixture(own, [3, 2, 1])
    read = {0: [], 1: [], 2: []}
    for step in range(180):
        source, record = mixture.record(step)
        read[source].append(record)
    for source, order in enumerate(own):
        assert read[source] == [order.record(step) for step in range(len(read[source]))]
    assert [len(records) for records in read.values()] == [90, 60, 30]


def test_steps_are_computed_in_any_order_and_depend_on_the_seed_and_the_host():
    mixture = Mixture(orders([50, 60]), [0.6, 0.4])
    straight = [mixture.record(step) for step in range(100)]
    again = Mixture(orders([50, 60]), [3, 2])
    assert [again.record(step) for step in reversed(range(100))] == straight[::-1]
    assert [Mixture(orders([50, 60], seed=1), [3, 2]).record(step) for step in range(100)] != straight
    hosts = [Mixture(orders([50, 60], index=index, count=2), [3, 2]) for index in range(2)]
    first, second = ([mixture.record(step) for step in range(50)] for mixture in hosts)
    # Of the first source each reads 25 records an epoch, of the second 30: within them nothing is read by both.
    for source, records in ((0, 25), (1, 20)):
        parts = [[pair for pair in steps if pair[0] == source][:records] for steps in (first, second)]
        assert len(set(parts[0]) | set(parts[1])) == 2 * records
    assert [source for source, _ in first] != [source for source, _ in second]


def test_one_source_is_its_own_order():
    (order,) = orders([17], seed=9)
    mixture = Mixture([order], [0.3])
    assert [mixture.record(step) for step in range(40)] == [(0, order.record(step)) for step in range(40)]
    assert mixture.steps_per_pass == 17


def test_a_pass_reaches_every_record_of_every_source():
    mixture = Mixture(orders([11, 30, 2]), [0.5, 0.25, 0.25])
    assert mixture.steps_per_pass == 120
    assert len({mixture.record(step) for step in range(120)}) == 43


@pytest.mark.parametrize("weights", [[], [1, 0], [1, -2], [1, float("nan")], [1, float("inf")], [1, 1e-5]])
def test_weights_that_are_refused(weights):
    with pytest.raises(ValueError, match="weights of the sources"):
        block_counts(weights)
