"""ERNIE 4.5 in JAX: train, post-train, quantise and serve heterogeneous mixture-of-experts models on any device mesh."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ernie_jax.checkpoint import load_pretrained, save_pretrained
from ernie_jax.config import ComputeConfig, ModelConfig, config_from_hf, count_parameters, preset
from ernie_jax.data import Tokenizer
from ernie_jax.data.vision import ImageProcessor, VideoProcessor
from ernie_jax.models import TextModel, init_model
from ernie_jax.serve import chat, generate
from ernie_jax.sharding import make_layout, make_mesh

if TYPE_CHECKING:
    from ernie_jax.plan.plan import make_plan as plan

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
    "plan",
    "preset",
    "save_pretrained",
]


def __getattr__(name: str) -> Any:
    """The planner is imported when it is first asked for."""
    if name == "plan":
        return importlib.import_module("ernie_jax.plan")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
