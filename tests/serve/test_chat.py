"""Chats in, answers out: images read and placed, the end of an answer, several conversations, and what is refused."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import ernie_jax as ej
from ernie_jax.data import train_tokenizer
from ernie_jax.data.chat import MEDIA_TOKENS, BuiltinTemplate, encode_chat
from ernie_jax.data.vision import ImageProcessor, VideoProcessor
from ernie_jax.models import init_model
from ernie_jax.serve import MultimodalPrompt, generate_tokens
from ernie_jax.serve.chat import _answer, stop_ids
from ernie_jax.testing import tiny_moe

SAMPLE = ["User: what is this?\nAssistant: a cat\n", "Picture 1: a dog, Video 2: birds"] * 40
CHAT_TOKENS = ["<|begin_of_sentence|>", "<|end_of_sentence|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", *MEDIA_TOKENS]
SIZES = {"patch_size": 4, "merge_size": 2, "min_pixels": 64, "max_pixels": 4096}
NEW = 6


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train_tokenizer(SAMPLE, 300, tmp_path_factory.mktemp("tokenizer"), CHAT_TOKENS)


@pytest.fixture(scope="module")
def config(request, tokenizer):
    golden = ej.config_from_hf(request.path.parent.parent / "golden" / "vl")
    return replace(golden, vocab_size=tokenizer.vocab_size, initializer_range=0.2)


@pytest.fixture(scope="module")
def model(config):
    return init_model(config, seed=1)


@pytest.fixture(scope="module")
def picture():
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8))


@pytest.fixture(scope="module")
def options():
    video = VideoProcessor(**SIZES, num_frames=4, min_frames=2, draw_timestamps=False)
    return {"image_processor": ImageProcessor(**SIZES), "video_processor": video, "max_new_tokens": NEW}


def user(*items):
    return [{"role": "user", "content": list(items)}]


def text(words):
    return {"type": "text", "text": words}


def image(source):
    return {"type": "image", "image": source}


@pytest.fixture(scope="module")
def by_hand(model, tokenizer, picture):
    """Token ids of the answer to a question about the picture, each step on its own."""
    patches = ImageProcessor(**SIZES)(picture)
    assert patches.grid_thw == (1, 4, 8)
    encoded = encode_chat(
        user(image(picture), text("what?")), tokenizer, BuiltinTemplate("vl"), add_generation_prompt=True, media_tokens=[8]
    )
    (answer,) = generate_tokens(model, [MultimodalPrompt.of_chat(encoded, [patches])], max_new_tokens=NEW, stop_token_ids=[-1])
    return answer.token_ids


def test_an_answer_about_an_image(model, tokenizer, picture, options, by_hand):
    answer = ej.chat(model, tokenizer, user(image(picture), text("what?")), **options)
    assert isinstance(answer, str)
    assert answer == tokenizer.decode(by_hand)
    # Other pixels are another question.
    other = Image.fromarray(255 - np.asarray(picture))
    assert ej.chat(model, tokenizer, user(image(other), text("what?")), **options) != answer


def test_conversations_of_all_kinds_in_one_call(model, tokenizer, picture, options):
    frames = np.random.default_rng(1).integers(0, 256, (5, 16, 24, 3), np.uint8)
    conversations = [
        user(image(picture), text("what?")),
        [{"role": "user", "content": "a dog?"}],
        user({"type": "video", "video": frames}, image(picture), text("birds?")),
    ]
    together = ej.chat(model, tokenizer, conversations, **options)
    assert together == [ej.chat(model, tokenizer, conversation, **options) for conversation in conversations]
    assert len(set(together)) == 3


def test_the_templates_end_ends_an_answer(model, tokenizer, picture, options, by_hand):
    # With tied embeddings the end's row, a little longer than that of a token of the answer, wins wherever the token would.
    end, place = tokenizer.special_tokens["<|end_of_sentence|>"], len(set(by_hand[:3])) - 1
    table = model.embed.embedding[...]
    try:
        model.embed.embedding[...] = table.at[end].set(1.01 * table[by_hand[place]])
        answer = ej.chat(model, tokenizer, user(image(picture), text("what?")), **options)
    finally:
        model.embed.embedding[...] = jnp.asarray(table)
    assert answer == tokenizer.decode(by_hand[: by_hand.index(by_hand[place])])


def test_stop_tokens_of_each_kind(config, tokenizer):
    ids = tokenizer.special_tokens
    ends = {ids["<|end_of_sentence|>"], ids["</s>"], config.eos_token_id}
    assert set(stop_ids(config, tokenizer, BuiltinTemplate("vl"))) == ends
    thinking = (ends - {ids["<|end_of_sentence|>"]}) | {ids["<|im_end|>"]}
    assert set(stop_ids(config, tokenizer, BuiltinTemplate("thinking"))) == thinking


def test_the_end_of_thinking_stays_in_the_answer(tokenizer):
    ids = tokenizer.special_tokens
    written = [*tokenizer.encode("it is small"), ids["</think>"], *tokenizer.encode("\n\na cat"), ids["<|IMAGE_START|>"]]
    assert _answer(tokenizer, written) == "it is small</think>\n\na cat"


def test_mistakes_are_told_before_an_image_is_read(model, tokenizer, options):
    missing = user(image("no/such/file.png"), text("what?"))
    with pytest.raises(ValueError, match="message 0 is the assistant's"):
        ej.chat(model, tokenizer, [missing, [{"role": "assistant", "content": "a cat"}]], **options)
    with pytest.raises(ValueError, match=r"the image_processor has {'patch_size': 14}, the model has {'patch_size': 4"):
        ej.chat(model, tokenizer, missing, image_processor=ImageProcessor())
    with pytest.raises(ValueError, match=r"no/such/file\.png"):
        ej.chat(model, tokenizer, missing, **options)
    with pytest.raises(ValueError, match="this is a text model"):
        ej.chat(init_model(tiny_moe(vocab_size=tokenizer.vocab_size)), tokenizer, missing)
    with pytest.raises(ValueError, match="messages is empty"):
        ej.chat(model, tokenizer, [])
