"""Plans of where experts stand: never worse, equal numbers, nodes first, and close to the best there is."""

import itertools

import numpy as np
import pytest

from ernie_jax.moe.placement import device_loads, plan_layer, plan_layers


def fullest(load, places, devices):
    return device_loads(load[None], places[None], devices).max()


def test_a_plan_by_hand():
    # Two devices of two: 8 + 4 against 2 + 2 becomes 8 + 2 against 4 + 2 by one exchange; who stays keeps its place.
    load = np.array([8.0, 4.0, 2.0, 2.0])
    places = plan_layer(load, np.arange(4), devices=2)
    assert sorted(device_loads(load[None], places[None], 2)[0]) == [6, 10]
    assert np.sum(places == np.arange(4)) == 2


@pytest.mark.parametrize(("devices", "nodes"), [(8, 1), (8, 2), (4, 4), (16, 4), (64, 8), (1, 1)])
def test_a_plan_is_a_permutation_and_never_worse(devices, nodes):
    rng = np.random.default_rng(devices + nodes)
    for _ in range(20):
        load, places = rng.gamma(0.7, size=64), rng.permutation(64)
        new = plan_layer(load, places, devices=devices, nodes=nodes)
        np.testing.assert_array_equal(np.sort(new), np.arange(64))
        assert fullest(load, new, devices) <= fullest(load, places, devices)
        assert fullest(load, new, nodes) <= fullest(load, places, nodes)
        # Nothing to gain a second time but what is below rounding.
        again = plan_layer(load, new, devices=devices, nodes=nodes, threshold=0.05)
        np.testing.assert_array_equal(again, new)
        np.testing.assert_array_equal(plan_layer(load, places, devices=devices, nodes=nodes), new)


def test_close_to_the_best_of_all_plans():
    """8 experts on 2 devices of 4: all 70 ways tried."""
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(30):
        load = rng.gamma(1.0, size=8)
        best = min(max(load[list(own)].sum(), load.sum() - load[list(own)].sum()) for own in itertools.combinations(range(8), 4))
        ratios.append(fullest(load, plan_layer(load, np.arange(8), devices=2), 2) / best)
    assert min(ratios) >= 1 - 1e-12
    assert np.mean(ratios) < 1.01 and max(ratios) < 1.05


def test_nodes_come_before_devices():
    """Heavy experts all on the first node: half of them leave it, and each device of a node gets one."""
    load = np.array([5.0, 5.0, 5.0, 5.0, 1.0, 1.0, 1.0, 1.0])
    new = plan_layer(load, np.arange(8), devices=4, nodes=2)
    np.testing.assert_array_equal(device_loads(load[None], new[None], 2), [[12, 12]])
    np.testing.assert_array_equal(device_loads(load[None], new[None], 4), [[6, 6, 6, 6]])


def test_a_small_gain_moves_nothing():
    load = np.array([1.02, 1.02, 1.0, 1.0])
    np.testing.assert_array_equal(plan_layer(load, np.arange(4), devices=2, threshold=0.02), np.arange(4))
    assert not np.array_equal(plan_layer(load, np.arange(4), devices=2, threshold=0.005), np.arange(4))


def test_no_load_and_equal_load_move_nothing():
    for load in (np.zeros(16), np.full(16, 3.0)):
        places = np.random.default_rng(1).permutation(16)
        np.testing.assert_array_equal(plan_layer(load, places, devices=4, nodes=2), places)


def test_layers_are_planned_apart():
    load = np.array([[4.0, 4.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    new = plan_layers(load, np.tile(np.arange(4), (2, 1)), devices=2)
    np.testing.assert_array_equal(device_loads(load, new, 2), [[5, 5], [2, 2]])
    np.testing.assert_array_equal(new[1], np.arange(4))


def test_what_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="10 experts on 4 devices of 1 nodes"):
        plan_layer(np.ones(10), np.arange(10), devices=4)
    with pytest.raises(ValueError, match="devices of 3 nodes"):
        plan_layer(np.ones(8), np.arange(8), devices=4, nodes=3)
    with pytest.raises(ValueError, match="not a permutation"):
        plan_layer(np.ones(2), np.zeros(2, int), devices=2)
