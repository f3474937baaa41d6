import numpy as np
import pytest

from ernie_jax.data.vision import VisionPatches, num_tokens, patchify


def test_rows_of_merge_blocks_lie_side_by_side_and_are_channel_major():
    # One digit a thing: pixel value = 1000 * channel + row * 10 + column of an 8x8 image, p = 2, m = 2.
    rows, columns = np.meshgrid(np.arange(8), np.arange(8), indexing="ij")
    image = np.stack([1000 * channel + 10 * rows + columns for channel in range(3)], axis=-1)
    cut = patchify(image, 2, 2)
    assert cut.shape == (16, 3, 2, 2)
    top_left = [int(patch[0, 0, 0]) for patch in cut]
    assert top_left == [0, 2, 20, 22, 4, 6, 24, 26, 40, 42, 60, 62, 44, 46, 64, 66]
    assert cut[3].reshape(-1).tolist() == [22, 23, 32, 33, 1022, 1023, 1032, 1033, 2022, 2023, 2032, 2033]


def test_num_tokens():
    assert num_tokens((1, 46, 34), 2, kind="image") == 391
    assert num_tokens((180, 30, 44), 2, kind="video") == 29_700
    assert num_tokens((4, 6, 6), 3, 4, kind="video") == 4


@pytest.mark.parametrize(
    ("grid", "kind", "message"),
    [
        ((1, 3, 4), "image", "does not divide into blocks of 2x2"),
        ((2, 4, 4), "image", "an image has one frame"),
        ((3, 4, 4), "video", "3 frames do not divide by 2"),
        ((1, 0, 4), "image", "does not divide"),
        ((2, 4, 4), "film", "kind is 'film'"),
    ],
)
def test_grids_that_give_no_tokens(grid, kind, message):
    with pytest.raises(ValueError, match=message):
        num_tokens(grid, 2, kind=kind)


@pytest.mark.parametrize(
    ("rows", "grid", "kind", "timestamps", "message"),
    [
        (15, (1, 4, 4), "image", (), "do not fill the grid"),
        (32, (2, 4, 4), "image", (), "an image has one frame"),
        (32, (2, 4, 4), "video", (0.0,), "got 1 timestamps"),
        (16, (1, 4, 4), "image", (0.0,), "got 1 timestamps"),
        (16, (1, 4, 4), "audio", (), "kind is 'audio'; expected one of image, video"),
    ],
)
def test_patches_that_contradict_themselves(rows, grid, kind, timestamps, message):
    with pytest.raises(ValueError, match=message):
        VisionPatches(np.zeros((rows, 48), np.float32), grid, kind, timestamps)
