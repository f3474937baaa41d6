"""Generation with a key/value cache, from text and from images."""

from ernie_jax.serve.chat import chat
from ernie_jax.serve.generate import Completion, generate, generate_tokens
from ernie_jax.serve.prompts import MultimodalPrompt, Prompt
from ernie_jax.serve.sampling import SamplingConfig, SamplingRows, kept_tokens, sample

__all__ = [
    "Completion",
    "MultimodalPrompt",
    "Prompt",
    "SamplingConfig",
    "SamplingRows",
    "chat",
    "generate",
    "generate_tokens",
    "kept_tokens",
    "sample",
]
