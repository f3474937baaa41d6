"""Streams of text: whole characters as soon as they are final, and in sum what `decode` says."""

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from ernie_jax.data import Tokenizer
from ernie_jax.data.stream_decoder import StreamDecoder

PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁Hello", "▁", "world", "你"]


def byte_fallback(strip=False):
    """A Llama-type model, as in published `tokenizer.json` files."""
    model = tokenizers.Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(PIECES)}, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    model.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    model.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(model, {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"})


def streamed(tokenizer, ids, **options):
    stream = StreamDecoder(tokenizer, **options)
    return [stream.push(index) for index in ids] + [stream.finish()]


def of_bytes(tokenizer, data):
    """Ids of single bytes: `<0xE4>`, or the byte-level letter for it."""
    if tokenizer.vocab_size == len(PIECES):
        return [3 + byte for byte in data]
    spelled = {tokenizer.token_bytes(index): index for index in range(tokenizer.vocab_size)}
    return [spelled[bytes([byte])] for byte in data]


@pytest.fixture(params=["byte level", "byte fallback"])
def either(request, tokenizer):
    return tokenizer if request.param == "byte level" else byte_fallback()


def test_characters_come_whole(either):
    ids = of_bytes(either, b"\xe4\xbd\xa0\xf0\x9f\x98\x80")
    assert streamed(either, ids) == ["", "", "你", "", "", "", "😀", ""]


def test_a_truncated_character_becomes_one_replacement_at_the_end(either):
    ids = of_bytes(either, b"a\xf0\x9f\x98")
    assert streamed(either, ids) == ["a", "", "", "", "\ufffd"]
    assert either.decode(ids) == "a\ufffd"


def test_a_byte_that_cannot_continue_ends_the_wait(either):
    assert streamed(either, of_bytes(either, b"\xe4\xbdA\x80")) == ["", "", "\ufffdA", "\ufffd", ""]


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_the_stream_equals_decode(data, tokenizer):
    for each in (tokenizer, byte_fallback(), byte_fallback(strip=True)):
        ids = data.draw(st.lists(st.integers(0, each.vocab_size - 1), max_size=12))
        for skip in (True, False):
            assert "".join(streamed(each, ids, skip_special=skip)) == each.decode(ids, skip)


@given(st.lists(st.integers(0, 299), max_size=12))
@settings(max_examples=100, deadline=None)
def test_byte_level_text_is_that_of_the_tokenizers_library(tokenizer, tmp_path_factory, ids):
    folder = tmp_path_factory.mktemp("saved")
    tokenizer.save(folder)
    model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.decode(ids) == model.decode(ids)
    assert tokenizer.decode(ids, skip_special=False) == model.decode(ids, skip_special_tokens=False)


def test_spaces_of_sentencepiece_pieces():
    hello, space, world = (PIECES.index(piece) for piece in ("▁Hello", "▁", "world"))
    assert streamed(byte_fallback(), [hello, space, world]) == [" Hello", " ", "world", ""]
    strips = byte_fallback(strip=True)
    assert streamed(strips, [1, hello, space, world]) == ["", "Hello", " ", "world", ""]
    assert streamed(strips, [space, space, world]) == ["", " ", "world", ""]
    assert strips.decode([1, hello, space, world]) == "Hello world"
    # A begin token that is shown is what the text begins with.
    assert strips.decode([1, hello], skip_special=False) == "<s> Hello"


def test_a_stream_can_be_used_again(either):
    stream = StreamDecoder(either)
    first, *rest = of_bytes(either, b"\xe4\xbd\xa0")
    assert (stream.push(first), stream.finish()) == ("", "\ufffd")
    assert [stream.push(index) for index in (first, *rest)] == ["", "", "你"]


def test_a_decoder_that_joins_by_neighbours_is_refused():
    model = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "</s>": 1}, merges=[]))
    plain = Tokenizer(model, {"eos_token": "</s>"})
    assert plain.decode([0, 0, 1]) == "a a"
    with pytest.raises(ValueError, match="neither byte-level"):
        StreamDecoder(plain)
