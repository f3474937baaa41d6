"""Logical axis -> mesh axes: the one table that decides what is sharded over what.

Parameters and activations name logical axes where they are created; nothing else in the model knows the mesh.
A rule set is a frozen table; `RULES` holds the presets:

  tp_sp  tensor parallel weights, sequence sharded over `tensor` between blocks, experts over `expert`
  fsdp   as tp_sp, and the `embed` dimension of every matrix over the data axes (ZeRO-3; also the optimiser rows of ZeRO-1)
  serve  as tp_sp without the sequence sharding, which single-token steps cannot use
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from ernie_jax.sharding.mesh import MESH_AXES

MeshAxes = tuple[str, ...]

# Outside MoE layers the expert axis carries data, so the batch is split over both.
BATCH_AXES: MeshAxes = ("data", "expert")
# What is left: the devices behind one batch shard, which share its images.
MODEL_AXES: MeshAxes = ("pipeline", "tensor")


@dataclass(frozen=True)
class AxisRules:
    """A named, immutable table from logical axis to mesh axes (an empty tuple replicates)."""

    name: str
    table: tuple[tuple[str, MeshAxes], ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for logical, axes in self.table:
            unknown = [axis for axis in axes if axis not in MESH_AXES]
            if unknown:
                raise ValueError(
                    f"rule {logical!r} -> {axes} of {self.name!r} names unknown mesh axes {unknown}; there are {MESH_AXES}"
                )
            if logical in seen:
                raise ValueError(f"rule set {self.name!r} has two rules for {logical!r}; keep one")
            seen.add(logical)

    def mesh_axes(self, logical: str) -> MeshAxes:
        """The mesh axes of one logical axis.

        Raises:
          ValueError: an axis without a rule, with the known names.
        """
        for name, axes in self.table:
            if name == logical:
                return axes
        raise ValueError(f"logical axis {logical!r} has no rule in {self.name!r}; known axes: {sorted(dict(self.table))}")

    def spec(self, logical: Sequence[str | None], what: str = "an array") -> PartitionSpec:
        """The PartitionSpec of an array from the logical name of each dimension (None replicates it).

        Raises:
          ValueError: an unknown logical axis, or two dimensions that claim one mesh axis; prints array, logical spec and rules.
        """
        parts: list[str | MeshAxes | None] = []
        used: dict[str, str] = {}
        for name in logical:
            axes = () if name is None else self.mesh_axes(name)
            for axis in axes:
                if axis in used:
                    raise ValueError(
                        f"{what} with logical axes {tuple(logical)}: {used[axis]!r} and {name!r} both map to mesh axis {axis!r} "
                        f"in rules {self.name!r} ({used[axis]} -> {self.mesh_axes(used[axis])}, {name} -> {axes}); change one rule"
                    )
                used[axis] = str(name)
            parts.append(None if not axes else axes[0] if len(axes) == 1 else axes)
        while parts and parts[-1] is None:
            parts.pop()
        return PartitionSpec(*parts)

    def replace(self, name: str, changes: Mapping[str, MeshAxes]) -> AxisRules:
        """A copy under another name with some rules changed or added."""
        table = dict(self.table) | dict(changes)
        return AxisRules(name, tuple(table.items()))


_TP_SP = AxisRules(
    "tp_sp",
    (
        # parameters
        ("layers", ()),
        ("vocab", ("tensor",)),
        ("embed", ()),
        ("heads", ("tensor",)),
        ("kv_heads", ("tensor",)),
        ("head_dim", ()),
        ("mlp", ("tensor",)),
        ("norm", ()),
        ("router_experts", ()),
        ("expert", ("expert",)),
        ("expert_embed", ()),
        ("expert_mlp", ("tensor",)),
        ("vision_embed", ()),
        ("vision_heads", ()),
        ("vision_mlp", ()),
        # activations
        ("batch", BATCH_AXES),
        ("sequence", ("tensor",)),
        ("full_sequence", ()),
        ("activation_embed", ()),
        ("activation_heads", ("tensor",)),
        ("activation_kv_heads", ("tensor",)),
        ("activation_mlp", ("tensor",)),
        ("activation_vocab", ("tensor",)),
        ("activation_experts", ()),
        ("tokens", BATCH_AXES),
        ("image_devices", MODEL_AXES),
    ),
)

RULES: dict[str, AxisRules] = {
    "tp_sp": _TP_SP,
    # Expert weights already use the expert axis for their first dimension, so only `data` is left for the second.
    "fsdp": _TP_SP.replace("fsdp", {"embed": BATCH_AXES, "expert_embed": ("data",), "vision_embed": BATCH_AXES}),
    "serve": _TP_SP.replace("serve", {"sequence": ()}),
}


def rules_named(name: str) -> AxisRules:
    """The preset rule set called `name`.

    Raises:
      ValueError: an unknown name, with those that exist.
    """
    if name not in RULES:
        raise ValueError(f"unknown sharding rules {name!r}; expected one of {sorted(RULES)}")
    return RULES[name]
