"""Models: decoder stack, text model, and how they are made."""

from ernie_jax.models.batches import Batch, batch_shardings, inputs_of
from ernie_jax.models.build import abstract_model, build_model, init_model, run_once_options
from ernie_jax.models.inputs import TextInputs, text_inputs
from ernie_jax.models.multimodal_inputs import multimodal_inputs
from ernie_jax.models.output import ModelOutput
from ernie_jax.models.text import TextModel
from ernie_jax.models.vision_inputs import MultimodalInputs, VisionInputs
from ernie_jax.models.vision_language import VisionLanguageModel

__all__ = [
    "Batch",
    "ModelOutput",
    "MultimodalInputs",
    "TextInputs",
    "TextModel",
    "VisionInputs",
    "VisionLanguageModel",
    "abstract_model",
    "batch_shardings",
    "build_model",
    "init_model",
    "inputs_of",
    "multimodal_inputs",
    "run_once_options",
    "text_inputs",
]
