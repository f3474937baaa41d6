"""One exchange of a MoE layer, compiled for fake devices and never run: what its collectives move, from the program's text.

n tokens of a device, G devices of the expert axis, N nodes of P devices, D columns, E experts, K chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ernie_jax.config import ComputeConfig
from ernie_jax.moe.expert_exchange import apply_experts
from ernie_jax.moe.experts import ExpertWeights
from ernie_jax.moe.routing import Routing
from ernie_jax.sharding import make_layout, make_mesh, use_layout
from ernie_jax.testing import collectives, tiny_moe

# What a value takes on its way.
BYTES = {"float32": 4, "bfloat16": 2, "fp8": 1, "int8": 1}


def load() -> None:
    """Starts the backend."""
    jax.devices()


class CompiledExchanges:
    """A side of a worker (see `benches.workers`): `facts` has the collectives of each way to exchange, and runs nothing.

    Options: `ways`, name -> fields of ComputeConfig; `devices`, `tokens` of one, `hidden`, `experts`, `experts_per_token`, `width`,
    `nodes`, `capacity_factor`.
    """

    parts: tuple[str, ...] = ()

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Compiles the layer, forward and backward, each way."""
        self.facts: dict[str, Any] = {name: _compiled(options, fields) for name, fields in options["ways"].items()}

    def run(self, part: str) -> object:
        """There is nothing to run."""
        raise AssertionError(part)


@dataclass(frozen=True)
class _Experts:
    """Experts that are these arrays, each at its own place."""

    arrays: ExpertWeights
    place: None = None

    def weights(self) -> ExpertWeights:
        return self.arrays


def _compiled(options: Mapping[str, Any], fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    devices, hidden, width, experts, k = (options[name] for name in ("devices", "hidden", "width", "experts", "experts_per_token"))
    # The dense products compile at once, and communicate no less.
    compute = ComputeConfig(grouped_matmul="dense", capacity_factor=options["capacity_factor"], **fields)
    dtype = jnp.dtype(compute.dtype)
    # Of the rest of the model nothing is used.
    config = tiny_moe(hidden_size=hidden, num_experts=experts, num_experts_per_tok=k)
    layout = make_layout(make_mesh(expert=devices, devices=jax.devices()[:devices]), config)

    def loss(x: jax.Array, weights: jax.Array, arrays: ExpertWeights, index: jax.Array) -> jax.Array:
        with use_layout(layout):
            y = apply_experts(x, Routing(index, weights), [_Experts(arrays)], (None,), compute, "silu")[0]  # type: ignore[list-item]
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

    shape = (devices, options["tokens"])
    arguments = (
        jax.ShapeDtypeStruct((*shape, hidden), dtype),
        jax.ShapeDtypeStruct((*shape, k), dtype),
        ExpertWeights(
            jax.ShapeDtypeStruct((experts, hidden, 2, width), dtype), jax.ShapeDtypeStruct((experts, width, hidden), dtype)
        ),
        jax.ShapeDtypeStruct((*shape, k), jnp.int32),
    )
    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*arguments).compile().as_text()
    per_node = devices // options["nodes"]
    return [
        {
            "kind": c.kind,
            # What a device receives, or would, were a reduce-scatter sent row by row.
            "bytes": c.bytes * (devices if c.kind == "reduce-scatter" else 1),
            "between_nodes": c.bytes_between(per_node),
            "dispatch": "moe_dispatch" in c.name,
            "backward": "transpose(" in c.name,
        }
        for c in collectives(text)
        if "moe_exchange" in c.name
    ]


@dataclass(frozen=True)
class Theory:
    """Bytes that one device receives, from the sizes alone: buckets full of rows, and what a row takes.

    Attributes:
      bucket: C, rows of a bucket of the flat exchange.
      tokens, devices, nodes, hidden, experts, k: n, G, N, D, E, K.
      dtype: compute format.
    """

    bucket: int
    tokens: int
    devices: int
    nodes: int
    hidden: int
    experts: int
    k: int
    dtype: str

    def value_bytes(self, name: str) -> int:
        """Of a value in a named format; the compute format in 16 bits is widened by XLA:CPU, and only by it."""
        return 4 if name == "compute" else BYTES[name]

    def row_bytes(self, name: str) -> int:
        """Of a row alone, with its scales."""
        scales = {"fp8": 4 * math.ceil(self.hidden / 128), "int8": 4}
        return self.hidden * self.value_bytes(name) + scales.get(name, 0)

    def listed_bytes(self, name: str, experts: int) -> int:
        """Of a row with the set of its experts among those of a peer, in whole words, and their weights."""
        slots = min(self.k, experts)
        if name == "compute":
            # An exchange of its own: experts and weights as floats.
            return self.row_bytes(name) + 4 * 2 * slots
        word = 2 if name == "bfloat16" else 1
        return self.row_bytes(name) + word * math.ceil(experts / (8 * word)) + 2 * slots

    def levels(self, dispatch: str) -> list[tuple[int, int]]:
        """(rows of all buckets of a device, experts of a peer) of each step."""
        n, devices, nodes = self.tokens, self.devices, self.nodes
        if dispatch == "two_level":
            each = devices // nodes
            across = min(n, each * self.bucket)
            return [
                (nodes * across, self.experts // nodes),
                (each * min(nodes * across, nodes * self.bucket), self.experts // devices),
            ]
        if dispatch == "replicated":
            return [(devices * n, self.experts)]
        return [(devices * self.bucket, self.experts // devices)]

    def dispatch(self, dispatch: str, name: str) -> int:
        """Forward, rows with their lists."""
        return sum(rows * self.listed_bytes(name, experts) for rows, experts in self.levels(dispatch))

    def returned(self, dispatch: str, name: str) -> int:
        """Bytes of a result: in bfloat16 with `bfloat16`, else in the compute format, which a sum on the way has in any case."""
        if name == "compute" or dispatch == "replicated":
            return self.row_bytes("compute")
        return self.row_bytes("bfloat16" if name == "bfloat16" else self.dtype)

    def back(self, dispatch: str, name: str) -> int:
        """Results of the same rows."""
        return sum(rows * self.returned(dispatch, name) for rows, _ in self.levels(dispatch))
