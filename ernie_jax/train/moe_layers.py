"""Between the order of MoE layers in a model and the stacks that hold their weights. L MoE layers, R repeats of a segment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from ernie_jax.config.model import ModelConfig
from ernie_jax.config.segments import segments_of

# The router of each modality in a MoE layer, and its experts.
EXPERTS_OF = {"router": "experts", "vision_router": "vision_experts"}


@dataclass(frozen=True)
class MoEStack:
    """One stack of MoE layers: the path under which its variables live, and each repeat's place among the L MoE layers."""

    path: str
    layers: tuple[int, ...]


def moe_stacks(config: ModelConfig) -> tuple[MoEStack, ...]:
    """All stacks of MoE layers of a model."""
    stacks: list[MoEStack] = []
    first = 0
    for s, segment in enumerate(segments_of(config)):
        places = [i for i, kind in enumerate(segment.unit) if kind == "moe"]
        for j, place in enumerate(places):
            layers = tuple(first + repeat * len(places) + j for repeat in range(segment.repeats))
            stacks.append(MoEStack(f"decoder/segments/{s}/layers/{place}/moe", layers))
        first += len(places) * segment.repeats
    return tuple(stacks)


def to_stacks(config: ModelConfig, name: str, by_layer: jax.Array) -> dict[str, jax.Array]:
    """[L, ...] in layer order -> `path/name` -> [R, ...] of each stack."""
    return {f"{stack.path}/{name}": by_layer[np.array(stack.layers)] for stack in moe_stacks(config)}


def from_stacks(config: ModelConfig, name: str, by_path: Mapping[str, jax.Array]) -> jax.Array:
    """`path/name` -> [R, ...] of each stack, to [L, ...] in layer order; L must be at least 1."""
    stacks = moe_stacks(config)
    order = np.argsort([layer for stack in stacks for layer in stack.layers])
    return jnp.concatenate([by_path[f"{stack.path}/{name}"] for stack in stacks])[order]
