"""Images placed on devices: every patch once, frames whole, token rows in order, shapes that seldom change."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ernie_jax.data.vision.geometry import patch_coordinates
from ernie_jax.data.vision.spread import bucket, spread_images

IMAGE, WIDE, VIDEO = (1, 4, 4), (1, 2, 6), (6, 4, 2)
GRID = st.tuples(st.sampled_from([1, 2, 4, 6]), st.sampled_from([2, 4, 6]), st.sampled_from([2, 4, 8]))


def rows_by_hand(grids, patches, merge=2):
    """Each token row as the ids of the patches in it, straight from the definition."""
    out, start = [], 0
    for t, h, w in grids:
        frames = start + np.arange(t * h * w).reshape(t, -1, merge * merge)
        pairs = [(0, 0)] if t == 1 else [(2 * i, 2 * i + 1) for i in range(t // 2)]
        out += [np.concatenate([frames[a], frames[b]], -1) for a, b in pairs]
        start += t * h * w
    return np.concatenate(out) if out else np.zeros((0, 2 * merge * merge), int)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(GRID, st.integers(0, 2)), max_size=9), st.integers(1, 4))
def test_every_row_is_made_of_its_own_patches(images, ranks):
    grids, groups = [g for g, _ in images], [g for _, g in images]
    spread = spread_images(grids, groups, num_groups=3, ranks=ranks, merge_size=2)
    used = spread.source[spread.source >= 0]
    assert sorted(used) == list(range(sum(int(np.prod(g)) for g in grids)))
    k = spread.pairs.shape[2]
    found = []
    for rows, group in zip(spread.rows, groups, strict=True):
        rank, place = rows // k, rows % k
        pairs = spread.pairs[group, rank, place]
        merged = spread.source[group].reshape(ranks, -1, 4)
        found += [np.concatenate([merged[r, a], merged[r, b]]) for r, (a, b) in zip(rank, pairs, strict=True)]
    expected = rows_by_hand(grids, used)
    np.testing.assert_array_equal(np.array(found).reshape(expected.shape), expected)
    # Attention segments are exactly the frames, and no frame is on two devices.
    coordinates, frames = patch_coordinates(grids, 2)
    real = spread.source >= 0
    np.testing.assert_array_equal(spread.position_ids[real], coordinates[spread.source[real]])
    assert ((spread.segment_ids > 0) == real).all()
    device = np.broadcast_to(np.arange(3 * ranks).reshape(3, ranks, 1), real.shape)
    where = {}
    for frame, d, segment in zip(frames[spread.source[real]], device[real], spread.segment_ids[real], strict=True):
        assert where.setdefault(frame, (d, segment)) == (d, segment)
    assert len(set(where.values())) == len(where)
    assert 1.0 <= spread.imbalance <= max(1.0, spread.naive_imbalance) + 1e-6


def test_a_long_video_is_split_between_devices_by_pairs_of_frames():
    spread = spread_images([VIDEO], [0], num_groups=1, ranks=3, merge_size=2)
    assert (spread.source >= 0).sum(-1).tolist() == [[16, 16, 16]]
    assert spread.imbalance == 1.0 and spread.naive_imbalance == 1.0


def test_an_image_is_paired_with_itself_and_an_odd_frame_is_lost():
    image = spread_images([IMAGE], [0], num_groups=1, ranks=1, merge_size=2)
    np.testing.assert_array_equal(image.pairs[0, 0, :4], [[0, 0], [1, 1], [2, 2], [3, 3]])
    odd = spread_images([(3, 4, 2)], [0], num_groups=1, ranks=1, merge_size=2)
    assert (odd.source >= 0).sum() == 16 and len(odd.rows[0]) == 2
    np.testing.assert_array_equal(odd.pairs[0, 0, odd.rows[0]], [[0, 2], [1, 3]])


def test_shapes_come_in_few_sizes():
    """Batches of other images seldom need another compilation; a fixed size never does."""
    assert [bucket(n) for n in (0, 1, 7, 8, 9, 10, 11, 13, 15, 17, 33, 1000)] == [1, 1, 7, 8, 10, 10, 12, 14, 16, 20, 40, 1024]
    assert len({bucket(n) for n in range(1, 4097)}) <= 4 * 12
    one, other = (spread_images(g, [0] * len(g), num_groups=1, ranks=2, merge_size=2) for g in ([IMAGE, WIDE], [WIDE, IMAGE, WIDE]))
    none = spread_images([], [], num_groups=1, ranks=2, merge_size=2, max_patches=32)
    fixed = spread_images([VIDEO], [0], num_groups=1, ranks=2, merge_size=2, max_patches=32)
    assert none.source.shape == fixed.source.shape == (1, 2, 32)
    assert one.source.shape[-1] == 16 and other.source.shape[-1] == 24
    assert (none.source == -1).all() and none.imbalance == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grids": [(1, 3, 4)]}, "must be multiples of the merge size 2"),
        ({"grids": [IMAGE], "max_patches": 12}, "would get 16 patches of images, max_patches is 12"),
        ({"grids": [IMAGE], "max_patches": 18}, "max_patches=18 is not a multiple of merge_size"),
    ],
)
def test_what_does_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        spread_images(groups=[0], num_groups=1, ranks=1, merge_size=2, **options)
