"""Positions in time, height and width: the reference case exactly, both advances, padding, errors."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ernie_jax.data.vision.geometry import patch_coordinates
from ernie_jax.data.vision.positions import media_positions, stream_positions

GOLDEN = load_file(Path(__file__).parents[2] / "golden" / "vl" / "io.safetensors")


def test_the_reference_case():
    positions, deltas = stream_positions(
        GOLDEN["mm_token_type_ids"], GOLDEN["image_grid_thw"], GOLDEN["video_grid_thw"], GOLDEN["attention_mask"], merge_size=2
    )
    np.testing.assert_array_equal(positions, GOLDEN["position_ids"])
    np.testing.assert_array_equal(deltas, GOLDEN["rope_deltas"].reshape(-1))
    # Written out in the specification.
    assert positions[0, 0].tolist() == [0, 1, 2, *[3] * 6, 6, 7, 8, 9, *[10] * 4, *[11] * 4, 12, 13, 14]
    assert positions[1, 0].tolist() == [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7, 8, 9, 10, 10, 11, 11, 10, 10, 11, 11, 12, 13, 14]
    assert positions[2, 0].tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8, 9, 10, 11, 10, 11, 10, 11, 10, 11, 12, 13, 14]


def test_a_long_video_tells_the_two_advances_apart():
    """Twelve frames of 4 x 4 patches behind two tokens: times 2..7, then text at 4 (reference) or 8 (original)."""
    kinds = np.array([[0, 0, *[2] * 24, 0]])
    video = np.array([[12, 4, 4]])
    reference, delta = stream_positions(kinds, None, video, merge_size=2)
    original, other = stream_positions(kinds, None, video, merge_size=2, advance="original")
    assert reference[0, 0, 2:26].tolist() == np.repeat(np.arange(2, 8), 4).tolist()
    assert reference[:, 0, -1].tolist() == [4, 4, 4]
    assert original[:, 0, -1].tolist() == [8, 8, 8]
    # 27 tokens; the largest position is a frame's, 7, in the one and the last token's, 8, in the other.
    assert (delta[0], other[0]) == (8 - 27, 9 - 27)
    np.testing.assert_array_equal(reference[:, 0, :-1], original[:, 0, :-1])


def test_padding_does_not_count_on_either_side():
    kinds = np.array([[0, 0, 0, 1, 1, 0, 0]])
    mask = np.array([[0, 0, 1, 1, 1, 1, 0]])
    positions, deltas = stream_positions(kinds, np.array([[1, 2, 4]]), None, mask, merge_size=2)
    assert positions[:, 0].tolist() == [[0, 0, 0, 1, 1, 3, 0], [0, 0, 0, 1, 1, 3, 0], [0, 0, 0, 1, 2, 3, 0]]
    assert deltas.tolist() == [4 - 4]


def test_rows_take_images_and_videos_from_their_own_lists_in_order():
    kinds = np.array([[2, 0, 1, 0], [1, 0, 2, 0]])
    positions, _ = stream_positions(kinds, np.array([[1, 2, 2], [1, 2, 2]]), np.array([[2, 2, 2], [2, 2, 2]]), merge_size=2)
    assert positions[0].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("kinds", "grids", "message"),
    [
        ([0, 1, 1], [(1, 2, 2)], "takes 1 tokens, the stream has 2 placeholders"),
        ([0, 1, 0, 1], [(1, 2, 2)], "only 1 grids are given"),
        ([0, 0], [(1, 2, 2)], "1 grids are given, the stream has placeholders for 0"),
        ([1], [(1, 3, 2)], r"\(1, 3, 2\): height and width must be multiples of the merge size 2"),
        ([1], [(0, 2, 2)], "expected three positive numbers"),
    ],
)
def test_what_does_not_fit(kinds, grids, message):
    with pytest.raises(ValueError, match=message):
        media_positions(np.array(kinds), grids, merge_size=2)
    with pytest.raises(ValueError, match="advance='old'; expected one of"):
        media_positions(np.array([0]), [], merge_size=2, advance="old")


def test_patches_come_in_merge_blocks():
    coordinates, frames = patch_coordinates([(2, 2, 4)], 2)
    block = [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    assert coordinates.tolist() == block * 2
    assert frames.tolist() == [1] * 8 + [2] * 8
