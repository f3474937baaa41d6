"""The moments of a step in pipeline stages that can be its fullest, in bytes of one device beside the step's arguments."""

from __future__ import annotations

from ernie_jax.config.run import RunConfig
from ernie_jax.plan.activation_memory import Bytes, LayerSizes
from ernie_jax.sharding import Layout


def pipeline_moments(run: RunConfig, sizes: LayerSizes, layout: Layout, moments: Layout) -> list[Bytes]:
    """Of a run with stages."""
    raise NotImplementedError
