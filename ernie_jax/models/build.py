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


def run_once_options() -> dict[str, str | bool] | None:
    """Compiler options of a program that runs once: on CPU, compiling an initialisation well takes longer than running it."""
    if jax.default_backend() != "cpu":
        return None
    return {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": True}


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
    created = jax.jit(state, out_shardings=shardings, compiler_options=run_once_options())()
    model: TextModel = nnx.merge(graphdef, created)
    return model
