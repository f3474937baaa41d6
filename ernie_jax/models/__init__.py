"""Models: decoder stack, text model, and how they are made."""

from ernie_jax.models.build import abstract_model, build_model, init_model, run_once_options
from ernie_jax.models.inputs import TextInputs, text_inputs
from ernie_jax.models.output import ModelOutput
from ernie_jax.models.text import TextModel
from ernie_jax.models.vision_language import VisionLanguageModel

__all__ = [
    "ModelOutput",
    "TextInputs",
    "TextModel",
    "VisionLanguageModel",
    "abstract_model",
    "build_model",
    "init_model",
    "run_once_options",
    "text_inputs",
]
