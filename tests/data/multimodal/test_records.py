"""Records: bad ones named by file and line or counted, paths, data: URLs, words that look like placeholders."""

import base64
import json

import numpy as np
import pytest
from PIL import Image

from ernie_jax.data import BadRecordError, heldout_multimodal_batches
from ernie_jax.data.chat import MediaTokens
from ernie_jax.data.multimodal import BatchShape


@pytest.fixture
def write(tmp_path):
    """`write(records)`: `data.jsonl` beside the images `good.png` and `torn.png`, as a source."""
    Image.new("RGB", (24, 16), (200, 0, 0)).save(tmp_path / "good.png")
    contents = (tmp_path / "good.png").read_bytes()
    (tmp_path / "torn.png").write_bytes(contents[: len(contents) // 2])
    Image.new("RGB", (2, 500)).save(tmp_path / "long.png")

    def make(*records):
        lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
        (tmp_path / "data.jsonl").write_text("\n".join(lines) + "\n")
        return [(str(tmp_path / "data.jsonl"), 1)]

    return make


def user(content):
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "yes"}]}


def media(kind, value):
    return user([{"type": kind, kind: value}])


BAD = {
    "not JSON": ("{", "not JSON"),
    "a list": ("[1]", "a JSON list"),
    "neither": ({"content": "x"}, "no field 'text'"),
    "both": ({"text": "x", **user("y")}, "both 'messages' and 'text'"),
    "no messages": ({"messages": []}, "messages is empty"),
    "a role": ({"messages": [{"role": "judge", "content": "x"}]}, "role 'judge'"),
    "an order": ({"messages": [{"role": "user", "content": "x"}] * 2}, "no message is the assistant's"),
    "two users": ({"messages": [{"role": "user", "content": "x"}] * 2 + [{"role": "assistant", "content": "y"}]}, "take turns"),
    "an item": (user([{"type": "sound", "sound": "x"}]), "type 'sound'"),
    "a number": (media("image", 3), "has the image 3"),
    "no file": (media("image", "absent.png"), "absent.png"),
    "torn": (media("image", "torn.png"), "torn.png"),
    "too long": (media("image", "long.png"), "aspect ratio"),
    "a web address": (media("image", "https://example.com/a.png"), "download it first"),
    "bad base64": (media("image", "data:image/png;base64,???"), "base64"),
    "no frames": (media("video", []), "without frames"),
    "no video": (media("video", "absent"), "absent"),
    "many tokens": (
        user([{"type": "image", "image": "good.png"}, {"type": "text", "text": "blue " * 200}]),
        "more than seq_len=120",
    ),
    "many patches": (user([{"type": "image", "image": "good.png"}] * 12), "max_patches is 256"),
}


@pytest.mark.parametrize(("record", "message"), BAD.values(), ids=BAD.keys())
def test_bad_records_are_named_or_counted(make_data, write, record, message):
    sources = write({"text": "good text"}, record, media("image", "good.png"))
    seq_len = 400 if message.startswith("max_patches") else 120
    arguments = {"sources": sources, "seq_len": seq_len, "batch_size": 1, "max_patches": 256, "shuffle": False}
    with make_data(**arguments) as data, pytest.raises(BadRecordError, match=r"data.jsonl, line 2: .*") as error:
        for _ in range(10):
            next(data)
    assert message in str(error.value)
    assert "on_bad_record='skip'" in str(error.value)
    with make_data(**arguments, on_bad_record="skip") as data:
        batches = [next(data) for _ in range(6)]
        assert data.skipped_records >= 1
    assert any(batch["document_kinds"].any() for batch in batches)


def test_nothing_but_bad_records_is_an_error_and_not_an_endless_search(make_data, write):
    sources = write(BAD["torn"][0], "", BAD["no file"][0])
    with make_data(sources=sources, on_bad_record="skip") as data, pytest.raises(ValueError, match="gave no token"):
        next(data)


def test_paths_data_urls_and_frames(write, tmp_path, make_encoder, processor):
    good = tmp_path / "good.png"
    url = "data:image/png;base64," + base64.b64encode(good.read_bytes()).decode()
    sources = write(media("image", "good.png"), media("image", str(good)), media("image", url), media("video", ["good.png", url]))
    shape = BatchShape(seq_len=64, batch_size=1)
    batches = list(heldout_multimodal_batches(paths=sources[0][0], encoder=make_encoder(), shape=shape, max_batches=None))
    expected = processor(str(good)).pixel_values
    counts = []
    for batch in batches:
        real = batch["pixel_values"][batch["patch_segment_ids"] > 0]
        counts.append(len(real) // len(expected))
        np.testing.assert_array_equal(real, np.tile(expected, (counts[-1], 1)))
    assert sum(counts) == 5


def test_words_that_look_like_a_placeholder_stay_words(write, make_encoder, tokenizer):
    words = "what does <|IMAGE_PLACEHOLDER|> mean, <|IMAGE_START|> too, and </s>?"
    record = user([{"type": "text", "text": words}, {"type": "image", "image": "good.png"}])
    sources = write(record, {"text": words})
    shape = BatchShape(seq_len=200, batch_size=1)
    (batch,) = heldout_multimodal_batches(paths=sources[0][0], encoder=make_encoder(), shape=shape, max_batches=None)
    tokens = MediaTokens.of(tokenizer)
    ids = batch["input_ids"][0]
    # 16 x 24 pixels: four by six patches, six tokens.
    assert (ids == tokens.image).sum() == (batch["feature_ids"] >= 0).sum() == 6
    assert (ids == tokens.image_start).sum() == 1
    assert tokenizer.decode(ids[batch["segment_ids"][0] > 0], skip_special=False).count(words) == 2


def test_a_conversation_without_images_is_text_and_may_be_cut(make_data, write):
    sources = write(user("blue " * 100))
    with make_data(sources=sources, seq_len=50) as data:
        batch = next(data)
    assert not batch["document_kinds"].any()
    assert not batch["modality_ids"].any()
    assert (batch["segment_ids"] > 0).all()
