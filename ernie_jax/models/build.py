"""Making models: as shapes only, or initialised where they will live."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from ernie_jax.config.compute import ComputeConfig
from ernie_jax.config.model import ModelConfig
from ernie_jax.models.text import TextModel
from ernie_jax.models.vision_language import VisionLanguageModel
from ernie_jax.sharding import Layout, state_shardings


def build_model(config: ModelConfig, compute: ComputeConfig, layout: Layout | None, rngs: nnx.Rngs) -> TextModel:
    """A model of the class the config asks for: text, or vision and language."""
    model_class = TextModel if config.vision is None else VisionLanguageModel
    return model_class(config, compute, layout=layout, rngs=rngs)


def abstract_model(config: ModelConfig, compute: ComputeConfig = ComputeConfig(), layout: Layout | None = None) -> TextModel:
    """The model with ShapeDtypeStruct in place of arrays: any size, no memory."""
    model: TextModel = nnx.eval_shape(lambda: build_model(config, compute, layout, nnx.Rngs(0)))
    return model


def init_model(
    config: ModelConfig, compute: ComputeConfig = ComputeConfig(), *, layout: Layout | None = None, seed: int = 0
) -> TextModel:
    """A freshly initialised model, each weight created on the devices that will hold it.

    The values depend on the seed alone, not on the mesh.
    """
    graphdef, abstract = nnx.split(abstract_model(config, compute, layout))

    def state() -> Any:
        return nnx.state(build_model(config, compute, layout, nnx.Rngs(seed)))

    shardings = None if layout is None else state_shardings(abstract, layout)
    model: TextModel = nnx.merge(graphdef, jax.jit(state, out_shardings=shardings)())
    return model
