"""Weights in and out of Hugging Face folders, and the state of training runs."""

from ernie_jax.checkpoint.export import save_pretrained
from ernie_jax.checkpoint.extra_tensors import ExtraTensors
from ernie_jax.checkpoint.pretrained import load_pretrained

__all__ = ["ExtraTensors", "load_pretrained", "save_pretrained"]
