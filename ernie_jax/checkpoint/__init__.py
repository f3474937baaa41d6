"""Weights in and out of Hugging Face folders, and the state of training runs."""

from ernie_jax.checkpoint.export import save_pretrained
from ernie_jax.checkpoint.extra_tensors import ExtraTensors
from ernie_jax.checkpoint.pretrained import load_pretrained
from ernie_jax.checkpoint.state import CheckpointWriteError, TrainCheckpointer

__all__ = ["CheckpointWriteError", "ExtraTensors", "TrainCheckpointer", "load_pretrained", "save_pretrained"]
