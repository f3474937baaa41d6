"""Limits of rows: rows within their share fit on the devices, and what is beyond it waits or is refused."""

import numpy as np
import pytest

from ernie_jax.data.multimodal import BatchShape, Document, PackedRow, Piece, RowLimits, RowPacker
from ernie_jax.data.multimodal.assembly import assemble, fits, take
from ernie_jax.data.vision import VisionPatches


def document(*images, tokens=None, width=4):
    """Images of these numbers of tokens in one line each; ids and positions do not matter here."""
    media = tuple(VisionPatches(np.ones((4 * n, width), np.float32), (1, 2, 2 * n), "image") for n in images)
    length = tokens or sum(images)
    nothing = np.zeros(length, np.int32)
    return Document(nothing, nothing, np.arange(length) < sum(images), nothing, np.zeros((length, 3), np.int32), media)


def row_of(*documents):
    row = PackedRow()
    for doc in documents:
        row.put(Piece(0, doc, 0, len(doc)))
    return row


@pytest.mark.parametrize(
    ("rows", "ranks", "largest", "share", "unit"),
    [
        (1, 1, None, 400, None),
        (4, 1, 80, 100, None),  # one device: n / R
        (1, 4, None, 400, None),  # 4 * 400 / (1 + 3)
        (4, 4, None, 228, None),  # 4 * 400 / (4 + 3) = 228.57
        (4, 4, 40, 370, 40),  # (4 * 400 - 3 * 40) / 4
        (4, 4, 5000, 228, None),
    ],
)
def test_the_share_of_a_row(rows, ranks, largest, share, unit):
    shape = BatchShape(seq_len=999, batch_size=rows, ranks=ranks, max_patches=400)
    limits = RowLimits.of(shape, merge_size=2, largest_unit=largest)
    assert (limits.share, limits.unit) == (share, unit)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("largest", [None, 48, 120])
def test_rows_within_their_share_always_fit(seed, largest):
    """Random images filled up to the share; the assembly refuses nothing."""
    rng = np.random.default_rng(seed)
    shape = BatchShape(seq_len=200, batch_size=8, shards=2, ranks=int(rng.integers(1, 5)), max_patches=240)
    limits = RowLimits.of(shape, merge_size=2, largest_unit=largest)
    rows = []
    for _ in range(8):
        row = PackedRow()
        while True:
            doc = document(int(rng.integers(1, 1 + min(largest or 999, limits.share) // 4)))
            if row.patches + doc.num_patches > limits.share:
                break
            row.put(Piece(0, doc, 0, len(doc)))
        rows.append(row)
    batch = assemble(rows, shape, merge_size=2, patch_width=4, pad_token_id=0)
    assert (batch["patch_segment_ids"] > 0).sum(-1).max() <= 240
    assert (batch["feature_ids"] >= 0).sum() == sum(row.patches for row in rows) // 4


def test_the_last_rows_with_images_wait_until_the_rest_fits():
    shape = BatchShape(seq_len=100, batch_size=4, max_patches=160)
    limits = RowLimits.of(shape, merge_size=2, largest_unit=None)
    assert limits.share == 40
    first, second, third, text = (row_of(document(20)), row_of(document(15)), row_of(document(25)), row_of(document(tokens=60)))
    assert (first.patches, second.patches, third.patches) == (80, 60, 100)
    taken, left = take([first, second, third, text], lambda rows: fits(rows, shape, limits))
    assert taken == [first, second, text]
    assert left == [third]


def test_beyond_the_share_a_document_shares_its_row_with_texts_alone():
    limits = RowLimits(tokens=100, merge_size=2, max_patches=160, share=40)
    packer = RowPacker(limits)
    big, small, text = document(20), document(5), document(tokens=40)
    for step, doc in enumerate([text, big, small, small, text]):
        packer.add(step, doc)
    # 40 + 20 + 40 tokens; the small ones have 20 patches each, too many beside the 80 of the big one.
    full = packer.next_row()
    assert packer.next_row() is None
    rest = packer.flush()
    assert [[piece.step for piece in row.pieces] for row in (full, rest)] == [[0, 1, 4], [2, 3]]
    assert packer.flush() is None


def test_a_document_that_no_devices_take_is_refused():
    limits = RowLimits.of(BatchShape(seq_len=400, batch_size=1, ranks=2, max_patches=100), merge_size=2, largest_unit=40)
    limits.check(document(10, 10, 10, 10))
    with pytest.raises(ValueError, match="put 120 on a device, max_patches is 100"):
        limits.check(document(10, 10, 10, 10, 10))
    with pytest.raises(ValueError, match="an image or pair of frames of 60 patches"):
        limits.check(document(15))
    with pytest.raises(ValueError, match="401 tokens"):
        limits.check(document(1, tokens=401))
