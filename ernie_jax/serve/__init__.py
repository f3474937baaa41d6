"""Generation with a key/value cache."""

from ernie_jax.serve.generate import Completion, generate, generate_tokens
from ernie_jax.serve.sampling import SamplingConfig, SamplingRows, kept_tokens, sample

__all__ = ["Completion", "SamplingConfig", "SamplingRows", "generate", "generate_tokens", "kept_tokens", "sample"]
