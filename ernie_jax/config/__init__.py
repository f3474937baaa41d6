"""Frozen configuration: model shapes and presets, how a model is run, a whole training run, and `config.json` both ways."""

from ernie_jax.config.compute import ComputeConfig
from ernie_jax.config.hf import config_from_hf, config_to_hf
from ernie_jax.config.model import ModelConfig, MoEConfig, VisionConfig
from ernie_jax.config.parameters import ParameterCount, count_parameters
from ernie_jax.config.parse import default_config, run_config_from
from ernie_jax.config.presets import PRESETS, preset
from ernie_jax.config.run import RunConfig
from ernie_jax.config.segments import Segment, segments_of

__all__ = [
    "PRESETS",
    "ComputeConfig",
    "MoEConfig",
    "ModelConfig",
    "ParameterCount",
    "RunConfig",
    "Segment",
    "VisionConfig",
    "config_from_hf",
    "config_to_hf",
    "count_parameters",
    "default_config",
    "preset",
    "run_config_from",
    "segments_of",
]
