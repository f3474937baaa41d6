"""A layout is a mesh and a rule table; inside it, logical names constrain arrays.

The layout travels as a static field of the model. While a model runs, `use_layout` makes it the current one, so that a
layer can write `constrain(x, "batch", "sequence", "activation_embed")` without being handed a mesh.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ernie_jax.config.model import ModelConfig
from ernie_jax.sharding.rules import AxisRules, rules_named

logger = logging.getLogger(__name__)

# Which size of a model each logical axis splits: (logical axis, what to call it, how to read it).
_SPLIT_SIZES = (
    ("vocab", "vocab_size", lambda c: c.vocab_size),
    ("embed", "hidden_size", lambda c: c.hidden_size),
    ("expert_embed", "hidden_size", lambda c: c.hidden_size if c.moe else None),
    ("heads", "num_attention_heads", lambda c: c.num_attention_heads),
    ("kv_heads", "num_key_value_heads", lambda c: c.num_key_value_heads),
    ("mlp", "intermediate_size", lambda c: c.intermediate_size),
    ("mlp", "the width of the shared experts", lambda c: c.moe.shared_intermediate_size if c.moe else None),
    ("expert", "moe.num_experts", lambda c: c.moe.num_experts if c.moe else None),
    ("expert_mlp", "moe.intermediate_size", lambda c: c.moe.intermediate_size if c.moe else None),
    ("expert_mlp", "moe.vision_intermediate_size", lambda c: c.moe.vision_intermediate_size if c.moe else None),
)


@dataclass(frozen=True)
class Layout:
    """Where everything lives: a mesh and the rules that map logical axes onto it. Hashable, so it can be static under jit."""

    mesh: Mesh
    rules: AxisRules

    @property
    def automatic_axes(self) -> tuple[str, ...]:
        """The mesh axes over which arrays are sharded by the compiler: all, but inside a `shard_map` over some, the others."""
        manual = _manual_axes()
        return tuple(axis for axis in self.mesh.axis_names if axis not in manual)

    @property
    def mesh_in_force(self) -> Mesh | AbstractMesh:
        """The mesh to name in a sharding or a `shard_map` at this place of a computation."""
        return jax.sharding.get_abstract_mesh() if _manual_axes() else self.mesh

    def axis_size(self, *mesh_axes: str) -> int:
        """Number of shards over the given mesh axes together; inside a `shard_map` over one of them, of what it has there."""
        manual = _manual_axes()
        return math.prod(self.mesh.shape[axis] for axis in mesh_axes if axis not in manual)

    def shards(self, logical: str) -> int:
        """Number of shards of one logical axis."""
        return self.axis_size(*self.rules.mesh_axes(logical))

    def spec(self, logical: Sequence[str | None], what: str = "an array") -> PartitionSpec:
        """PartitionSpec of an array with these logical axes (see `AxisRules.spec` for the errors)."""
        return self.automatic(self.rules.spec(logical, what))

    def automatic(self, spec: PartitionSpec) -> PartitionSpec:
        """`spec` without the mesh axes that are not sharded by the compiler at this place."""
        manual = _manual_axes()
        if not manual:
            return spec
        parts: list[Any] = []
        for part in spec:
            axes = () if part is None else (part,) if isinstance(part, str) else part
            left = tuple(axis for axis in axes if axis not in manual)
            parts.append(None if not left else left[0] if len(left) == 1 else left)
        return PartitionSpec(*parts)

    def sharding(self, logical: Sequence[str | None], what: str = "an array") -> NamedSharding:
        """NamedSharding of an array with these logical axes."""
        return NamedSharding(self.mesh_in_force, self.spec(logical, what))

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of scalars and of everything held whole on each device."""
        return NamedSharding(self.mesh, PartitionSpec())


def _manual_axes() -> tuple[str, ...]:
    """The mesh axes that a surrounding `shard_map` has taken over."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def make_layout(mesh: Mesh, config: ModelConfig, rules: str | AxisRules = "tp_sp") -> Layout:
    """A layout for one model, with every size checked against the mesh before any array is made.

    With fewer kv heads than tensor shards the kv heads are held whole by each shard (they are small, and every shard needs
    one of them); this is the only rule that yields.

    Raises:
      ValueError: a size of the model that its mesh axes do not divide, with the numbers.
    """
    table = rules_named(rules) if isinstance(rules, str) else rules
    if mesh.shape["pipeline"] > 1:
        table = _kept_by_stages(table, config.hidden_size, mesh)
    tensor, kv_heads = mesh.shape["tensor"], config.num_key_value_heads
    if "tensor" in table.mesh_axes("kv_heads") and kv_heads < tensor and tensor % kv_heads == 0:
        table = table.replace(table.name, {"kv_heads": (), "activation_kv_heads": ()})
    layout = Layout(mesh, table)
    for logical, label, read in _SPLIT_SIZES:
        size, shards = read(config), layout.shards(logical)
        if size and size % shards:
            axes = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in table.mesh_axes(logical))
            raise ValueError(
                f"{label}={size} cannot be split over {axes} ({shards} shards, remainder {size % shards}) by rules {table.name!r}; "
                f"choose mesh sizes whose product divides {size}"
            )
    return layout


def _kept_by_stages(table: AxisRules, hidden_size: int, mesh: Mesh) -> AxisRules:
    """Rules under which each stage keeps a part of every matrix.

    A stage runs some layers whole. Which ones is a matter of the schedule, and their number need not divide, so what is kept
    between steps is split along the model width instead; a step brings the layers together once, and their gradients back.
    """
    axes = {name: (*table.mesh_axes(name), "pipeline") for name in ("embed", "expert_embed")}
    if "pipeline" in table.mesh_axes("embed"):
        return table
    if any(hidden_size % math.prod(mesh.shape[axis] for axis in split) for split in axes.values()):
        logger.warning(
            "hidden_size=%d is not a multiple of the mesh's %s: every pipeline stage keeps all layers and their optimiser state",
            hidden_size,
            " x ".join(f"{axis}={mesh.shape[axis]}" for axis in axes["embed"]),
        )
        return table
    return table.replace(table.name, axes)


_current: contextvars.ContextVar[Layout | None] = contextvars.ContextVar("ernie_jax_layout", default=None)


@contextlib.contextmanager
def use_layout(layout: Layout | None) -> Iterator[None]:
    """Make `layout` the one that `constrain` and `current_layout` see inside the block."""
    token = _current.set(layout)
    try:
        yield
    finally:
        _current.reset(token)


def current_layout() -> Layout | None:
    """The layout of the model that is running, or None outside of one."""
    return _current.get()


def constrain(x: jax.Array, *logical: str | None) -> jax.Array:
    """Constrain an activation to the current layout by the logical name of each dimension; outside a layout, unchanged."""
    layout = _current.get()
    if layout is None or layout.mesh.size == 1:
        return x
    if len(logical) != x.ndim:
        raise ValueError(f"array of shape {x.shape} constrained with {len(logical)} logical axes {logical}; name each dimension")
    return jax.lax.with_sharding_constraint(x, layout.sharding(logical, f"activation of shape {x.shape}"))


def constrain_in_stage(x: jax.Array, *logical: str | None) -> jax.Array:
    """`constrain` inside a `shard_map` over some mesh axes, as in a pipeline stage; elsewhere `x` unchanged."""
    return constrain(x, *logical) if _manual_axes() else x


def constrain_cotangent(x: jax.Array, *logical: str | None) -> jax.Array:
    """`x` unchanged, with its cotangent constrained in the backward pass.

    For the output of a product whose result is laid out differently from its inputs: left alone, the partitioner may compute
    the backward product in the wrong layout and move the larger result.
    """
    layout = _current.get()
    if layout is None or layout.mesh.size == 1:
        return x
    # The sharding is taken now: the backward pass is traced after the layout has been left.
    return _with_cotangent_sharding(layout.sharding(logical, f"cotangent of shape {x.shape}"), x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_cotangent_sharding(sharding: NamedSharding, x: jax.Array) -> jax.Array:
    return x


def _forward(sharding: NamedSharding, x: jax.Array) -> tuple[jax.Array, None]:
    return x, None


def _backward(sharding: NamedSharding, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.with_sharding_constraint(cotangent, sharding),)


_with_cotangent_sharding.defvjp(_forward, _backward)
