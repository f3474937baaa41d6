import json
import sysconfig
from pathlib import Path

import pytest

from ernie_jax.data import standard_library_corpus


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return standard_library_corpus(tmp_path_factory.mktemp("corpus"), max_bytes=400_000, holdout_fraction=0.2)


def test_documents_are_excerpts_that_make_up_files_of_the_library(corpus):
    root = Path(sysconfig.get_path("stdlib"))
    files = {}
    for document in read(corpus.train_path) + read(corpus.heldout_path):
        files.setdefault(document["name"], []).append(document["text"])
    for name, excerpts in files.items():
        assert "".join(excerpts).encode() == (root / name).read_bytes()
        assert all(excerpt.endswith("\n") for excerpt in excerpts[:-1])
    lengths = sorted(len(excerpt) for excerpts in files.values() for excerpt in excerpts)
    assert lengths[len(lengths) // 2] <= 600


def test_sizes_are_those_of_the_text(corpus):
    for split in ("train", "heldout"):
        texts = [document["text"] for document in read(getattr(corpus, f"{split}_path"))]
        assert len(texts) == getattr(corpus, f"{split}_documents") > 0
        assert sum(len(text.encode()) for text in texts) == getattr(corpus, f"{split}_bytes")
    assert 300_000 < corpus.train_bytes + corpus.heldout_bytes <= 400_000


def test_no_tests_no_packages_and_no_file_in_both_splits(corpus):
    train, heldout = ({document["name"] for document in read(path)} for path in (corpus.train_path, corpus.heldout_path))
    assert not train & heldout
    folders = {part for name in train | heldout for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "dist-packages"}


def test_a_file_stays_in_its_split_when_the_budget_grows(corpus, tmp_path):
    larger = standard_library_corpus(tmp_path, max_bytes=800_000, holdout_fraction=0.2)
    small_heldout = {document["name"] for document in read(corpus.heldout_path)}
    assert not small_heldout & {document["name"] for document in read(larger.train_path)}


def test_equal_arguments_reuse_the_files(corpus):
    before = corpus.train_path.stat().st_mtime_ns
    again = standard_library_corpus(corpus.train_path.parent, max_bytes=400_000, holdout_fraction=0.2)
    assert again == corpus
    assert corpus.train_path.stat().st_mtime_ns == before


def test_a_damaged_file_is_made_anew_with_the_same_bytes(tmp_path):
    arguments = {"max_bytes": 60_000, "holdout_fraction": 0.3}
    corpus = standard_library_corpus(tmp_path, **arguments)
    whole = corpus.train_path.read_bytes()
    corpus.train_path.write_bytes(whole[:100])
    assert standard_library_corpus(tmp_path, **arguments) == corpus
    assert corpus.train_path.read_bytes() == whole


def test_another_seed_gives_another_corpus(tmp_path):
    arguments = {"max_bytes": 60_000, "holdout_fraction": 0.3}
    first = read(standard_library_corpus(tmp_path, **arguments).train_path)
    assert read(standard_library_corpus(tmp_path, seed=1, **arguments).train_path) != first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_bytes": 0}, "max_bytes is 0"),
        ({"holdout_fraction": 1.0}, r"holdout_fraction is 1\.0"),
        ({"max_bytes": 30}, "raise max_bytes"),
    ],
)
def test_wrong_arguments(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        standard_library_corpus(tmp_path, **arguments)
