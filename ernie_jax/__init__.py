"""ERNIE 4.5 in JAX: train, post-train, quantise and serve heterogeneous mixture-of-experts models on any device mesh."""

from ernie_jax.checkpoint import load_pretrained, save_pretrained
from ernie_jax.config import ComputeConfig, ModelConfig, config_from_hf, count_parameters, preset
from ernie_jax.data import Tokenizer
from ernie_jax.data.vision import ImageProcessor, VideoProcessor
from ernie_jax.models import TextModel, init_model
from ernie_jax.serve import chat, generate
from ernie_jax.sharding import make_layout, make_mesh

__version__ = "0.1.0"

__all__ = [
    "ComputeConfig",
    "ImageProcessor",
    "ModelConfig",
    "TextModel",
    "Tokenizer",
    "VideoProcessor",
    "chat",
    "config_from_hf",
    "count_parameters",
    "generate",
    "init_model",
    "load_pretrained",
    "make_layout",
    "make_mesh",
    "preset",
    "save_pretrained",
]
