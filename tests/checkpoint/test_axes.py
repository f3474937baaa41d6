"""Axis expressions against hand-written numpy."""

import numpy as np
import pytest

from ernie_jax.checkpoint.axes import AxisMap


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def _whole(sizes):
    return {name: slice(0, size) for name, size in sizes.items()}


def test_query_projection(rng):
    hub = rng.normal(size=(12, 5))  # 3 heads of 4, hidden 5
    axes = AxisMap.parse("(h d) D -> layer D h d")
    sizes = axes.sizes((7, 5, 3, 4))
    assert axes.hub_shape(sizes) == (12, 5)
    ours = axes.to_ours(hub, sizes, _whole(sizes))
    for head in range(3):
        np.testing.assert_array_equal(ours[:, head], hub[4 * head : 4 * head + 4].T)
    np.testing.assert_array_equal(axes.to_hub(ours), hub)


def test_output_projection(rng):
    hub = rng.normal(size=(5, 12))
    axes = AxisMap.parse("D (h d) -> layer h d D")
    sizes = axes.sizes((7, 3, 4, 5))
    ours = axes.to_ours(hub, sizes, _whole(sizes))
    np.testing.assert_array_equal(ours[2, 1], hub[:, 2 * 4 + 1])
    np.testing.assert_array_equal(axes.to_hub(ours), hub)


def test_a_part_is_read_from_its_rows_and_columns(rng):
    hub = rng.normal(size=(12, 5))
    axes = AxisMap.parse("(h d) D -> layer D h d")
    sizes = axes.sizes((7, 5, 3, 4))
    want = {"layer": slice(0, 1), "D": slice(1, 4), "h": slice(1, 3), "d": slice(2, 4)}
    region = axes.hub_region(sizes, want)
    assert region == (slice(4, 12), slice(1, 4))
    whole = axes.to_ours(hub, sizes, _whole(sizes))
    np.testing.assert_array_equal(axes.to_ours(hub[region], sizes, want), whole[1:4, 1:3, 2:4])


def test_fixed_places():
    gate = AxisMap.parse("F D -> layer D 0 F")
    assert gate.ours == ("layer", "D", 0, "F")
    # Both modalities' biases are rows of one published tensor.
    second = AxisMap.parse("1 E -> layer E")
    sizes = second.sizes((3, 8))
    assert second.hub_shape(sizes) == (2, 8)
    assert second.hub_region(sizes, _whole(sizes)) == (slice(1, 2), slice(0, 8))
    np.testing.assert_array_equal(second.to_ours(np.arange(8)[None], sizes, _whole(sizes)), np.arange(8))
    assert second.to_hub(np.arange(8)).shape == (1, 8)
