"""Small corpora and a small tokenizer for the data tests."""

import json

import pytest
from etils import epath

from ernie_jax.data import Tokenizer, train_tokenizer

SAMPLE = [f"def f{i}(x):\n    return x + {i}  # the sum of both\n" for i in range(50)]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return train_tokenizer(SAMPLE, 300, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def write_jsonl(tmp_path):
    """`write_jsonl(name, texts)`: a JSONL file with the texts, its path as a string."""

    def write(name, texts):
        path = tmp_path / name
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def remote(tmp_path):
    """`gs://bucket`, whose contents are the files of `tmp_path`, so that remote paths are read without a network."""
    root = "gs://bucket"

    def local(path):
        assert str(path).startswith(root), "a local path must not be asked for here"
        return str(tmp_path) + str(path)[len(root) :]

    def on_local(function, path, *arguments):
        return function(local(path), *arguments)

    def glob(function, path):
        return [root + found[len(str(tmp_path)) :] for found in function(local(path))]

    with epath.testing.mock_epath(
        open=lambda function, path, mode: function(local(path), mode), exists=on_local, isdir=on_local, stat=on_local, glob=glob
    ):
        yield root
