"""Images, conversations about them and texts, made on the spot."""

import json

import numpy as np
import pytest
from PIL import Image

from ernie_jax.data import Tokenizer, train_tokenizer
from ernie_jax.data.chat import MEDIA_TOKENS, chat_template_of
from ernie_jax.data.multimodal import BatchShape, DocumentEncoder, make_multimodal_pipeline
from ernie_jax.data.vision import ImageProcessor, VideoProcessor

WORDS = ["User: what is this? Picture 1:\nAssistant: a red square\n", "the colour of the square is blue", "one two three"] * 30
PATCH = 4  # pixels; two by two patches are a token


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Tokenizer:
    special = ["<|begin_of_sentence|>", "<|end_of_sentence|>", *MEDIA_TOKENS]
    return train_tokenizer(WORDS, 340, tmp_path_factory.mktemp("tokenizer"), special)


@pytest.fixture(scope="session")
def processor() -> ImageProcessor:
    return ImageProcessor(patch_size=PATCH, merge_size=2, min_pixels=64, max_pixels=64 * 64)


@pytest.fixture(scope="session")
def make_encoder(tokenizer, processor):
    """`make_encoder(train_on=..., ...)`"""

    def make(**changes):
        video = VideoProcessor(
            patch_size=PATCH, merge_size=2, min_pixels=64, max_pixels=64 * 64, min_frames=2, max_frames=6, draw_timestamps=False
        )
        parts = {
            "tokenizer": tokenizer,
            "template": chat_template_of(None, "vl"),
            "image_processor": processor,
            "video_processor": video,
        }
        return DocumentEncoder(**parts | changes)

    return make


@pytest.fixture(scope="session")
def chat_of():
    """`chat_of("what?", "a cat", image, ...)`: a record of a question about images and its answer."""

    def make(question, answer, *images, kind="image"):
        items = [{"type": kind, kind: image} for image in images] + [{"type": "text", "text": question}]
        return {"messages": [{"role": "user", "content": items}, {"role": "assistant", "content": answer}]}

    return make


@pytest.fixture(scope="session")
def files(tmp_path_factory, chat_of):
    """A folder with images of many sizes, `chats.jsonl` (24 records), `texts.jsonl` (15 records) and `book.txt`."""
    folder = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(0)
    (folder / "images").mkdir()
    names = []
    for number in range(20):
        height, width = rng.integers(8, 60, 2)
        names.append(f"images/{number}.png")
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / names[-1])
    (folder / "frames").mkdir()
    for number in range(4):
        Image.fromarray(rng.integers(0, 256, (24, 40, 3), dtype=np.uint8)).save(folder / "frames" / f"{number}.png")
    chats = [chat_of(f"what is number {i}?", f"the square {i}", *names[i : i + 1 + i % 2]) for i in range(20)]
    chats.append(chat_of("and the film?", "blue squares", "frames", kind="video"))
    chats.append(chat_of("and the film?", "blue", [f"frames/{i}.png" for i in (0, 2)], kind="video"))
    chats += [chat_of("no picture here", "it is text " * 30), {"text": "a plain text among the chats"}]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    texts = [f"text {i}: " + " ".join(f"word{j}" for j in range(3 + 11 * (i % 5))) for i in range(15)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "book.txt").write_text("one two three, " * 40)
    return folder


@pytest.fixture
def make_data(files, make_encoder):
    """`make_data(seq_len=..., sources=..., train_on=..., ...)`: a pipeline over the files, with small defaults."""

    def make(**changes):
        shape = {name: changes.pop(name) for name in BatchShape.__dataclass_fields__ if name in changes}
        shape = BatchShape(**{"seq_len": 160, "batch_size": 4} | shape)
        encoder = make_encoder(**{name: changes.pop(name) for name in ("train_on", "advance", "template") if name in changes})
        defaults = {
            "sources": [(str(files / "chats.jsonl"), 2), ([str(files / "texts.jsonl"), str(files / "book.txt")], 1)],
            "encoder": encoder,
            "shape": shape,
            "seed": 3,
            "prefetch": 0,
        }
        return make_multimodal_pipeline(**defaults | changes)

    return make
