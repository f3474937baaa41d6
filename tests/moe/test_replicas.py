"""Copies of hot experts: every slot filled, copies apart, and the fullest device within its bound."""

import numpy as np
import pytest

from ernie_jax.moe.replicas import plan_replicas


def zipf(experts, exponent):
    return 1e4 / np.arange(1, experts + 1) ** exponent


def test_a_plan_by_hand():
    """Loads 6, 2, 2, 2 on 3 devices of 2 slots: the first expert gets both spare slots, so each device has 2 + 2."""
    plan = plan_replicas(np.array([6.0, 2.0, 2.0, 2.0]), slots=2, devices=3)
    np.testing.assert_array_equal(plan.copies, [3, 1, 1, 1])
    assert sorted(map(tuple, plan.experts.tolist())) == [(0, 1), (0, 2), (0, 3)]
    np.testing.assert_array_equal(plan.device_loads(np.array([6.0, 2.0, 2.0, 2.0])), [4, 4, 4])


@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize("slots", [8, 9, 10, 16])
@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.0, 1.5])
def test_every_expert_somewhere_none_twice_on_a_device_and_the_bound(exponent, slots, nodes):
    devices, load = 8, np.random.default_rng(slots).permutation(zipf(64, exponent))
    plan = plan_replicas(load, slots=slots, devices=devices, nodes=nodes)
    assert plan.experts.shape == (devices, slots)
    np.testing.assert_array_equal(np.bincount(plan.experts.reshape(-1), minlength=64), plan.copies)
    assert plan.copies.min() >= 1
    assert all(len(set(device)) == slots for device in plan.experts.tolist())
    loads = plan.device_loads(load)
    np.testing.assert_allclose(loads.sum(), load.sum())
    copy = (load / plan.copies).max()
    assert loads.max() <= loads.mean() + copy * (1 + (nodes / devices if nodes > 1 else 0)) + 1e-6
    if plan.copies.max() < devices:
        assert copy <= load.sum() / (devices * slots - 64 + 1) + 1e-6


def test_spare_slots_balance_what_no_placement_can():
    """An expert with a fifth of all load fills a device of eight on its own; two slots more a device bring the rate above 0.95."""
    load = zipf(64, 1.0)
    rates = {
        slots: loads.mean() / loads.max()
        for slots in (8, 10)
        if len(loads := plan_replicas(load, slots=slots, devices=8, nodes=2).device_loads(load))
    }
    assert rates[8] < 0.6 < 0.95 < rates[10]


def test_slots_that_cannot_be_filled_are_refused():
    with pytest.raises(ValueError, match="7 slots on each of 8 devices for 64 experts; expected from 8"):
        plan_replicas(np.ones(64), slots=7, devices=8)
    with pytest.raises(ValueError, match="to 4 "):
        plan_replicas(np.ones(4), slots=5, devices=2)
    with pytest.raises(ValueError, match="3 nodes"):
        plan_replicas(np.ones(64), slots=8, devices=8, nodes=3)
