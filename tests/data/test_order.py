import numpy as np
import pytest

from ernie_jax.data.order import RecordOrder, host_rows, permuted


def epoch(order, number):
    size = order.records_per_epoch
    return [order.record(step) for step in range(number * size, (number + 1) * size)]


@pytest.mark.parametrize("num_records", [1, 2, 3, 7, 64, 1001])
def test_an_epoch_is_a_permutation(num_records):
    order = RecordOrder(num_records=num_records, seed=3)
    assert sorted(epoch(order, 0)) == sorted(epoch(order, 5)) == list(range(num_records))


def test_the_permutation_depends_on_seed_and_epoch():
    orders = {seed: [epoch(RecordOrder(num_records=50, seed=seed), number) for number in range(3)] for seed in range(3)}
    assert orders[1] == [epoch(RecordOrder(num_records=50, seed=1), number) for number in range(3)]
    # Not by their sum: epoch 1 of seed 0 is not epoch 0 of seed 1.
    flat = [tuple(order) for by_epoch in orders.values() for order in by_epoch]
    assert len(set(flat)) == 9
    assert tuple(range(50)) not in flat


def test_permutations_are_uniform_enough():
    # Where index 0 of 5 lands, and which of the 6 orders of 3 comes out, over many epochs: chi-square within its 99.9% bound.
    for size, statistic, cells, bound in (
        (5, lambda keys: permuted(0, 5, keys), 5, 18.5),
        (3, lambda keys: permuted(0, 3, keys) * 3 + permuted(1, 3, keys), 6, 20.5),
    ):
        counts: dict[int, int] = {}
        for epoch_number in range(1200):
            keys = tuple(int(key) for key in np.random.SeedSequence([size, epoch_number]).generate_state(6, np.uint64))
            outcome = statistic(keys)
            counts[outcome] = counts.get(outcome, 0) + 1
        assert len(counts) == cells
        assert sum((count - 1200 / cells) ** 2 / (1200 / cells) for count in counts.values()) < bound


def test_place_i_of_the_permuted_order_goes_to_host_i_modulo_hosts():
    everything = RecordOrder(num_records=11, seed=5)
    for number in (0, 1, 4):
        order = epoch(everything, number)
        for host in range(3):
            part = RecordOrder(num_records=11, seed=5, process_index=host, process_count=3)
            assert epoch(part, number) == order[host::3]


def test_without_shuffling_every_epoch_has_the_order_of_the_files():
    order = RecordOrder(num_records=5, seed=1, shuffle=False)
    assert epoch(order, 0) == epoch(order, 1) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_records": 3, "process_count": 4}, "3 records cannot be shared by 4 processes"),
        ({"num_records": 3, "seed": -1}, "seed is -1"),
        ({"num_records": 3, "process_index": 2, "process_count": 2}, "process_index is 2; expected 0 to 1"),
    ],
)
def test_wrong_orders(arguments, message):
    with pytest.raises(ValueError, match=message):
        RecordOrder(**arguments)


def test_rows_of_hosts():
    assert [host_rows(12, host, 3) for host in range(3)] == [slice(0, 4), slice(4, 8), slice(8, 12)]
    with pytest.raises(ValueError, match=r"batch_size 10 does not divide evenly among 4 processes; .* for example 12"):
        host_rows(10, 0, 4)
    with pytest.raises(ValueError, match="batch_size 0 does not divide"):
        host_rows(0, 0, 1)
    with pytest.raises(ValueError, match="process_index is 3"):
        host_rows(12, 3, 3)
