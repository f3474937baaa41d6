"""The published kind of files: a SentencePiece model with byte pieces, added tokens beside it."""

import io
import json
import pickle
import random

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from ernie_jax.data import Tokenizer

SENTENCES = ["the cat sat on the mat 2024", "你好, 世界 hello", "def f(x):\n    return x + 10", "  two  spaces   three"] * 40
MEDIA = ["<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>", "<|VIDEO_START|>", "<|VIDEO_END|>"]
CONFIG = {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>", "pad_token": "<unk>", "add_prefix_space": False}


def train(**options):
    """Contents of a `tokenizer.model`: BPE with byte pieces, digits one by one, as ERNIE's."""
    written = io.BytesIO()
    options = {
        "vocab_size": 360,
        "model_type": "bpe",
        "byte_fallback": True,
        "user_defined_symbols": [*"0123456789", "<|end_of_sentence|>"],
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "allow_whitespace_only_pieces": True,
        "hard_vocab_limit": False,
        "num_threads": 1,
        "minloglevel": 2,
    } | options
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(SENTENCES), model_writer=written, **options)
    return written.getvalue()


@pytest.fixture(scope="module")
def model():
    return train()


def folder_of(path, model, config=None, added=None):
    path.mkdir(exist_ok=True)
    (path / "tokenizer.model").write_bytes(model)
    (path / "tokenizer_config.json").write_text(json.dumps(config or CONFIG))
    size = sentencepiece.SentencePieceProcessor(model_proto=model).vocab_size()
    added = {name: size + i for i, name in enumerate([*MEDIA, "<|LOC_1|>"])} if added is None else added
    (path / "added_tokens.json").write_text(json.dumps(added))
    return path


@pytest.fixture(scope="module")
def published(tmp_path_factory, model):
    return Tokenizer.from_folder(folder_of(tmp_path_factory.mktemp("published"), model))


@pytest.fixture(scope="module")
def reference(model):
    return sentencepiece.SentencePieceProcessor(model_proto=model)


TEXTS = [
    "",
    " ",
    "a" * 1000,
    "naïve café",
    "e\u0301 \u200b\ufeff\x00\x1f",
    "the cat",
    " the cat",
    "   the   cat  ",
    "\n\n  return x\n",
    "你好, 世界",
    "魑魅 😀👩‍👩‍👧",
    "1234567890 and 3.14",
    "\t\x00",
    "0",
]


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_sentencepieces_own(published, reference, text):
    assert published.encode(text) == reference.encode(text)
    assert published.decode(published.encode(text)) == text


# U+2581 is how SentencePiece writes a space; in a text it comes back as one.
@given(st.text(st.characters(exclude_characters="▁", exclude_categories=["Cs"])))
@settings(max_examples=50, deadline=None)
def test_any_text_comes_back_exactly(published, reference, text):
    ids = published.encode(text)
    assert ids == reference.encode(text)
    assert published.decode(ids) == text


def test_digits_are_single_tokens(published):
    assert [published.token_id(digit) for digit in "120"] == published.encode("120")


def test_no_space_is_put_in_front_where_the_model_would(tmp_path):
    model = train(add_dummy_prefix=True)
    tokenizer = Tokenizer.from_folder(folder_of(tmp_path, model))
    prefixing = sentencepiece.SentencePieceProcessor(model_proto=model)
    for text in ("the cat", "x", "12"):
        assert tokenizer.encode(" " + text) == prefixing.encode(text) != tokenizer.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("name", ["</s>", "<s>", "<unk>", "<|end_of_sentence|>", "<|IMAGE_PLACEHOLDER|>", "<|LOC_1|>"])
def test_markers_are_plain_text_unless_allowed(published, name):
    index = published.special_tokens[name]
    assert index == published.token_id(name)
    plain = published.encode(f"a{name} b")
    assert index not in plain
    assert published.decode(plain) == f"a{name} b"
    allowed = published.encode(f"a{name} b", allow_special=[name])
    assert allowed == [*published.encode("a"), index, *published.encode(" b")]
    assert published.decode(allowed, skip_special=False) == f"a{name} b"


def test_decode_skips_what_the_files_call_special_only(tmp_path, model):
    added = {"<|LOC_1|>": 500, "<think>": 501}
    config = CONFIG | {"added_tokens_decoder": {"501": {"content": "<think>", "special": True}}}
    tokenizer = Tokenizer.from_folder(folder_of(tmp_path, model, config, added))
    assert tokenizer.vocab_size == 502
    assert tokenizer.decode([500, 501]) == "<|LOC_1|>"
    assert tokenizer.decode([500, 501], skip_special=False) == "<|LOC_1|><think>"
    assert tokenizer.decode([499]) == ""


def test_digits_among_the_control_pieces_are_text(tmp_path):
    model = train(user_defined_symbols=[], control_symbols=list("0123456789"))
    tokenizer = Tokenizer.from_folder(folder_of(tmp_path, model, CONFIG | {"additional_special_tokens": list("0123456789")}, {}))
    assert tokenizer.encode("120") == [tokenizer.token_id(digit) for digit in "120"]
    assert tokenizer.decode(tokenizer.encode("a 120")) == "a 120"
    assert not set("0123456789") & set(tokenizer.special_tokens)


def test_a_normaliser_that_folds_characters_forges_nothing(tmp_path):
    model = train(normalization_rule_name="nmt_nfkc")
    tokenizer = Tokenizer.from_folder(folder_of(tmp_path, model))
    full_width = "\uff1c|end_of_sentence|\uff1e"
    assert tokenizer.token_id("<|end_of_sentence|>") not in tokenizer.encode(full_width)


def test_saving_keeps_the_file_itself(published, model, tmp_path):
    published.save(tmp_path)
    assert (tmp_path / "tokenizer.model").read_bytes() == model
    again = Tokenizer.from_folder(tmp_path)
    assert again.fingerprint() == published.fingerprint()
    assert again.special_tokens == published.special_tokens
    copied = pickle.loads(pickle.dumps(published))
    assert copied.encode(" </s> 12") == published.encode(" </s> 12") == again.encode(" </s> 12")


def test_files_that_do_not_fit_are_refused(tmp_path, model):
    with pytest.raises(ValueError, match=r"'<\|X\|>' has id 5, which does not fit"):
        Tokenizer.from_folder(folder_of(tmp_path, model, added={"<|X|>": 5}))
    with pytest.raises(ValueError, match="'</s>' has id 900"):
        Tokenizer.from_folder(folder_of(tmp_path, model, added={"</s>": 900}))
    with pytest.raises(ValueError, match="does not agree"):
        decoder = {"added_tokens_decoder": {"500": {"content": "<|X|>"}}}
        Tokenizer.from_folder(folder_of(tmp_path, model, CONFIG | decoder, {"<|X|>": 501}))
    with pytest.raises(ValueError, match="add_prefix_space"):
        Tokenizer.from_folder(folder_of(tmp_path, model, CONFIG | {"add_prefix_space": True}))
    with pytest.raises(ValueError, match="not a SentencePiece model"):
        Tokenizer.from_folder(folder_of(tmp_path, model) and _overwritten(tmp_path, b"\xff\x00"))
    with pytest.raises(ValueError, match="not a SentencePiece model"):
        Tokenizer.from_folder(_overwritten(tmp_path, b""))
    (tmp_path / "tokenizer.model").unlink()
    with pytest.raises(ValueError, match=r"no tokenizer\.model"):
        Tokenizer.from_folder(tmp_path)


def _overwritten(path, data):
    (path / "tokenizer.model").write_bytes(data)
    return path


def test_a_lone_surrogate_is_refused(published):
    with pytest.raises(ValueError, match="UTF-8"):
        published.encode("\ud800")


def test_random_mixtures_agree_with_sentencepiece(published, reference):
    rng = random.Random(0)
    atoms = ["the", " ", "  ", "\n", "cat", "1", "23", "你", "好", "😀", "é", "x", ".", "<", "|", "end"]
    for _ in range(300):
        text = "".join(rng.choices(atoms, k=12))
        assert published.encode(text) == reference.encode(text)
