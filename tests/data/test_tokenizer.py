import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models

from ernie_jax.data import Tokenizer, train_tokenizer

SAMPLE = [f"def f{i}(x):\n    return x + {i}  # the sum of both\n" for i in range(50)]

AWKWARD = [
    "",
    " ",
    "\n\n\t",
    "a" * 1000,
    "naïve café",
    "漢字かな交じり文",
    "🙂👩‍👩‍👧‍👦",
    "e\u0301 \u200b\ufeff\x00\x1f",
    "</s><s><unk>",
    "  x  ",
]


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_text_comes_back_exactly(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text())
@settings(max_examples=50, deadline=None)
def test_any_text_comes_back_exactly(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(3 <= index < tokenizer.vocab_size for index in ids)


def test_special_tokens_have_the_first_ids_and_are_added_on_request_only(tokenizer):
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    plain = tokenizer.encode("return x")
    assert tokenizer.encode("return x", add_bos=True, add_eos=True) == [1, *plain, 2]
    assert tokenizer.decode([1, *plain, 2]) == "return x"
    assert tokenizer.decode([1, *plain, 2], skip_special=False) == "<s>return x</s>"


def test_text_that_spells_a_special_token_is_plain_even_where_training_saw_it_often(tmp_path):
    trained = train_tokenizer(["</s><s>x</s> <unk>"] * 500, 320, tmp_path)
    for text in ("</s>", "a</s>b", "<s>", "<unk>", "</s></s>"):
        ids = trained.encode(text)
        assert not {0, 1, 2} & set(ids)
        assert trained.decode(ids) == text


def test_a_model_whose_merges_spell_the_end_token_is_refused(tmp_path):
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "<": 3, "/": 4, "s": 5, ">": 6, "</": 7, "s>": 8}
    model = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("<", "/"), ("s", ">"), ("</", "s>")]))
    forged = Tokenizer(model, {"eos_token": "</s>"})
    with pytest.raises(ValueError, match="special id 2"):
        forged.encode("</s>")


def test_a_lone_surrogate_is_refused(tokenizer):
    with pytest.raises(ValueError, match="UTF-8"):
        tokenizer.encode("\ud800")


def test_merges_shorten_what_training_saw(tokenizer):
    assert tokenizer.vocab_size == 300
    assert len(tokenizer.encode(SAMPLE[0])) < 0.6 * len(SAMPLE[0])


def test_training_is_deterministic_and_the_fingerprint_tells_tokenizers_apart(tokenizer, tmp_path):
    assert train_tokenizer(SAMPLE, 300, tmp_path).fingerprint() == tokenizer.fingerprint()
    assert train_tokenizer(SAMPLE, 299, tmp_path).fingerprint() != tokenizer.fingerprint()
    assert train_tokenizer(SAMPLE[:2], 280, tmp_path).fingerprint() != tokenizer.fingerprint()


def test_saved_folder_reads_back_equal(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "a")
    again = Tokenizer.from_folder(tmp_path / "a")
    assert again.fingerprint() == tokenizer.fingerprint()
    assert again.encode("x + 1 </s>") == tokenizer.encode("x + 1 </s>")
    config = json.loads((tmp_path / "a" / "tokenizer_config.json").read_text())
    assert (config["pad_token"], config["bos_token"], config["eos_token"]) == ("<unk>", "<s>", "</s>")
    special = json.loads((tmp_path / "a" / "special_tokens_map.json").read_text())
    assert special == {"unk_token": "<unk>", "pad_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


def test_other_keys_of_a_tokenizer_config_survive(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "a")
    file = tmp_path / "a" / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {"chat_template": "{{ messages }}", "eos_token": {"content": "</s>", "lstrip": False}}
    file.write_text(json.dumps(config))
    Tokenizer.from_folder(tmp_path / "a").save(tmp_path / "b")
    assert json.loads((tmp_path / "b" / "tokenizer_config.json").read_text()) == config


def test_truncation_and_padding_saved_in_a_model_are_switched_off(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    model = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    model.enable_truncation(4)
    model.enable_padding(length=64)
    model.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_folder(tmp_path).encode(SAMPLE[0]) == tokenizer.encode(SAMPLE[0])


def test_missing_files_and_names(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer\.json in .*nowhere"):
        Tokenizer.from_folder(tmp_path / "nowhere")
    tokenizer.save(tmp_path)
    (tmp_path / "special_tokens_map.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match="names no eos_token"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    with pytest.raises(ValueError, match="eos_token is '<end>'"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    bare = Tokenizer.from_folder(tmp_path)
    assert (bare.bos_token_id, bare.pad_token_id) == (None, 2)
    with pytest.raises(ValueError, match="names no bos_token"):
        bare.encode("x", add_bos=True)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"is not a tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_wrong_training_arguments(tmp_path):
    with pytest.raises(ValueError, match="at least 259"):
        train_tokenizer(SAMPLE, 258, tmp_path)
    with pytest.raises(ValueError, match="one string"):
        train_tokenizer("a document", 300, tmp_path)
