"""A tokenizer with the tokens of a vision-language chat."""

import pytest

from ernie_jax.data import Tokenizer, train_tokenizer
from ernie_jax.data.chat import MEDIA_TOKENS

SAMPLE = ["User: what is this?\nAssistant: a cat\n", "Picture 1: a dog, Video 2: birds", "think about it\n\n"] * 40
CHAT_TOKENS = ["<|begin_of_sentence|>", "<|end_of_sentence|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", *MEDIA_TOKENS]


@pytest.fixture(scope="session")
def chat_tokenizer(tmp_path_factory) -> Tokenizer:
    return train_tokenizer(SAMPLE, 340, tmp_path_factory.mktemp("chat_tokenizer"), CHAT_TOKENS)
