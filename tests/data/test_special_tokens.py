"""Special tokens come from a caller's wish only, whole and the longest first; other added tokens that are markers likewise."""

import pickle

import pytest
import tokenizers
from tokenizers import AddedToken

from ernie_jax.data import Tokenizer, train_tokenizer
from ernie_jax.data.special_tokens import is_marker

SAMPLE = ["what does <|IMAGE_PLACEHOLDER|> mean? 12 3"] * 60
SPECIAL = ["<|IMAGE_PLACEHOLDER|>", "<|x|>", "<|x|>long"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("special")
    train_tokenizer(SAMPLE, 300, path, SPECIAL)
    return path


@pytest.fixture(scope="module")
def trained(folder):
    return Tokenizer.from_folder(folder)


def test_trained_special_tokens_follow_the_first_three(trained):
    assert trained.special_tokens == dict(zip(["<unk>", "<s>", "</s>", *SPECIAL], range(6), strict=True))
    assert trained.token_id("<|x|>") == 4
    assert trained.vocab_size <= 300


def test_special_tokens_are_plain_unless_allowed(trained):
    text = "a<|x|>long</s>"
    plain = trained.encode(text)
    assert not set(range(6)) & set(plain)
    assert trained.decode(plain) == text
    a, long = trained.encode("a"), trained.encode("long")
    assert trained.encode(text, allow_special=True) == [*a, 5, 2]
    assert trained.encode("a<|x|>", allow_special=["<|x|>"]) == [*a, 4]
    assert trained.encode("a<|x|>long", allow_special={"<|x|>"}) == [*a, 4, *long]
    assert trained.encode("a<|x|>long", allow_special=()) == trained.encode("a<|x|>long")
    assert trained.encode("<|x|>", allow_special=True, add_bos=True, add_eos=True) == [1, 4, 2]


def test_unknown_names_are_refused_with_near_ones(trained):
    with pytest.raises(ValueError, match=r"no token '<\|IMAGE_PLACEHOLDR\|>'.*did you mean '<\|IMAGE_PLACEHOLDER\|>'"):
        trained.token_id("<|IMAGE_PLACEHOLDR|>")
    with pytest.raises(ValueError, match=r"'<\|y\|>', which is no special token"):
        trained.encode("a", allow_special=["<|y|>"])
    with pytest.raises(ValueError, match="one string"):
        trained.encode("a", allow_special="<s>")


def test_added_markers_that_are_not_special_are_plain_too_and_shown(folder, tmp_path):
    model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    model.add_tokens([AddedToken("<|LOC_1|>", special=False), AddedToken("abra", special=False), AddedToken("<think>")])
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text())
    tokenizer = Tokenizer.from_folder(tmp_path)
    loc, word, think = (tokenizer.token_id(name) for name in ("<|LOC_1|>", "abra", "<think>"))
    ids = tokenizer.encode("<|LOC_1|> abra <think>")
    assert word in ids and not {loc, think} & set(ids)
    assert tokenizer.decode(ids) == "<|LOC_1|> abra <think>"
    assert tokenizer.encode("<|LOC_1|>", allow_special=True) == [loc]
    assert tokenizer.decode([3, loc, think]) == "<|LOC_1|><think>"
    assert pickle.loads(pickle.dumps(tokenizer)).encode("<|LOC_1|></s>") == tokenizer.encode("<|LOC_1|></s>")
    tokenizer.save(tmp_path / "again")
    saved = tokenizers.Tokenizer.from_file(str(tmp_path / "again" / "tokenizer.json"))
    assert not saved.get_added_tokens_decoder()[loc].special


def test_digits_that_a_file_calls_special_stay_text(folder, tmp_path):
    model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    model.add_special_tokens(list("0123456789"))
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text())
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("12") == [tokenizer.token_id("1"), tokenizer.token_id("2")]
    assert tokenizer.decode(tokenizer.encode("a 12")) == "a 12"


@pytest.mark.parametrize(
    ("token", "special", "expected"),
    [("<|a|>", False, True), ("[IMG]", False, True), ("abra", True, True), ("abra", False, False), ("7", True, False)],
)
def test_what_a_marker_is(token, special, expected):
    assert is_marker(token, special) == expected


def test_wrong_special_tokens_to_train(tmp_path):
    for wrong in (["<|a|>", "<|a|>"], ["</s>"], ["a"], [""]):
        with pytest.raises(ValueError, match="special_tokens must differ"):
            train_tokenizer(SAMPLE, 300, tmp_path, wrong)
    with pytest.raises(ValueError, match="at least 260: 4 special tokens"):
        train_tokenizer(SAMPLE, 259, tmp_path, ["<|a|>"])
    with pytest.raises(ValueError, match="one string"):
        train_tokenizer(SAMPLE, 300, tmp_path, "<|a|>")
    with pytest.raises(ValueError, match="merges turn plain text"):
        train_tokenizer(["what"] * 50, 300, tmp_path, ["what"])


def test_a_chat_template_file_is_kept(trained, folder, tmp_path):
    (tmp_path / "a").mkdir()
    trained.save(tmp_path / "a")
    assert not (tmp_path / "a" / "chat_template.jinja").exists()
    (tmp_path / "a" / "chat_template.jinja").write_bytes("{{ 'é' }}\r\n".encode())
    Tokenizer.from_folder(tmp_path / "a").save(tmp_path / "b")
    assert (tmp_path / "b" / "chat_template.jinja").read_bytes() == "{{ 'é' }}\r\n".encode()
