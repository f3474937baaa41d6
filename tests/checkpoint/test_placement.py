"""Pieces of a region, and arrays put together from them."""

import itertools

import jax
import numpy as np
import pytest

from ernie_jax.checkpoint.placement import assemble, fill_device, pieces
from ernie_jax.sharding import make_mesh


@pytest.mark.parametrize("budget", [1, 4, 40, 100, 10_000])
def test_pieces_cover_a_region_once_within_the_budget(budget):
    region = (slice(1, 4), slice(0, 1), slice(2, 7), slice(3, 6))
    seen = np.zeros((5, 2, 8, 7), int)
    for piece in pieces(region, 4, budget):
        seen[piece] += 1
        # One element of 4 bytes is the least a piece can be.
        assert 4 * np.prod([s.stop - s.start for s in piece]) <= max(budget, 4)
    assert seen.sum() == seen[region].sum() == 45
    assert seen.max() == 1


@pytest.mark.parametrize("budget", [100, 1 << 20])
def test_assembled_onto_a_mesh_reading_each_part_once(budget):
    mesh = make_mesh(data=2, tensor=2, expert=2)
    values = np.arange(8 * 6 * 4, dtype=np.float32).reshape(8, 6, 4)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("expert", "tensor"))
    read = []

    def source(region):
        read.append(region)
        return values[region]

    array = assemble(values.shape, np.float32, sharding, source, budget=budget)
    assert array.sharding == sharding
    np.testing.assert_array_equal(np.asarray(array), values)
    # The two copies over `data` share one read.
    assert sum(np.prod([s.stop - s.start for s in region]) for region in read) == values.size


def test_filled_on_devices_with_their_own_memory():
    values = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    places = [(slice(i, i + 1), slice(j, j + 2), slice(0, 5)) for i, j in itertools.product(range(3), (0, 2))]
    owners = jax.devices()[2:4]
    arrays = fill_device(values.shape, values.dtype, owners, ((place, values[place]) for place in places))
    for array, device in zip(arrays, owners, strict=True):
        assert array.devices() == {device}
        np.testing.assert_array_equal(np.asarray(array), values)
