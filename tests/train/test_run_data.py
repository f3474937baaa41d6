"""Texts that a run makes its own files and tokenizer of."""

import json

from ernie_jax.train.run_data import texts_of


def test_all_texts_unless_a_sample_is_asked_for(tmp_path):
    texts = [character * 40 for character in "abcdé"]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert list(texts_of(path)) == texts
    # The text that reaches the number is still given.
    assert list(texts_of(path, 81)) == texts[:3]
