"""Questions about digits: who is held out, what the images are, that the same request gives the same files."""

import json

import numpy as np
import pytest

from ernie_jax.data.digits import PAIR_QUESTION, QUESTIONS, SIDES, digit_corpus
from ernie_jax.data.vision import ImageProcessor, read_image

SMALL = {"held_out": 1700, "copies": 2, "pairs": 30}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return digit_corpus(tmp_path_factory.mktemp("digits"), **SMALL)


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_numbers_of_questions(corpus):
    assert (corpus.train_conversations, corpus.heldout_conversations) == (97 * 2 + 30, 1700 + 170)
    for path, count in ((corpus.train_path, 224), (corpus.heldout_path, 1870)):
        assert len(records(path)) == count


def test_answers_are_the_digits_shown(corpus):
    """Each image has one label, whichever question shows it."""
    labels = {}
    for record in records(corpus.train_path):
        question, answer = record["messages"]
        shown = [item["image"] for item in question["content"] if item["type"] == "image"]
        words = question["content"][-1]["text"]
        assert words in QUESTIONS if len(shown) == 1 else (len(shown), words) == (2, PAIR_QUESTION)
        for path, digit in zip(shown, answer["content"].split(" and "), strict=True):
            assert labels.setdefault(path, digit) == digit and digit in "0123456789"
    assert len(labels) == 97 * 2 and len(set(labels.values())) == 10


def test_images_are_real_and_of_several_sizes(corpus):
    folder = corpus.train_path.parent
    paths = sorted((folder / "train").iterdir())
    shapes = {read_image(path).shape for path in paths}
    assert len(shapes) == 3 and {side for shape in shapes for side in shape[:2]} == set(SIDES)
    assert all(read_image(path).max() > 128 for path in paths)
    # The sides are whole blocks of patches of the demo's model: no image is resized once more.
    patches = ImageProcessor(patch_size=8, min_pixels=256, max_pixels=16384)(paths[0])
    height, width = read_image(paths[0]).shape[:2]
    assert patches.grid_thw == (1, height // 8, width // 8)


def test_every_digit_is_on_one_side(corpus):
    """Single questions of both sides, those of training halved (two copies), are the labels of the whole set."""
    targets = np.bincount(pytest.importorskip("sklearn.datasets").load_digits().target, minlength=10)
    counts = np.zeros(10)
    for path, copies in ((corpus.train_path, 2), (corpus.heldout_path, 1)):
        answers = [r["messages"][1]["content"] for r in records(path)]
        counts += np.bincount([int(a) for a in answers if len(a) == 1], minlength=10) / copies
    np.testing.assert_array_equal(counts, targets)


def test_the_same_request_is_not_made_again(corpus):
    before = corpus.train_path.stat().st_mtime_ns
    assert digit_corpus(corpus.train_path.parent, **SMALL) == corpus
    assert corpus.train_path.stat().st_mtime_ns == before


def test_equal_seeds_give_equal_files(tmp_path):
    one, two = (digit_corpus(tmp_path / name, held_out=1790, copies=1, pairs=3) for name in ("one", "two"))
    assert one.train_path.read_bytes() == two.train_path.read_bytes()
    for path in (tmp_path / "one" / "train").iterdir():
        np.testing.assert_array_equal(read_image(path), read_image(tmp_path / "two" / "train" / path.name))


def test_numbers_out_of_range(tmp_path):
    with pytest.raises(ValueError, match="held_out=1797"):
        digit_corpus(tmp_path, held_out=1797)
