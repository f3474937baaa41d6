"""The weights of the routed experts of one modality. D model, F width, E experts, R layers of a stack."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
from flax import nnx

from ernie_jax.config.compute import ComputeConfig
from ernie_jax.config.model import MoEConfig
from ernie_jax.moe.places import ExpertPlace, own_places
from ernie_jax.nn.dtypes import DtypePolicy
from ernie_jax.nn.parameter import normal, parameter
from ernie_jax.sharding import current_layout


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertWeights:
    """Of one layer: gate_up [E, D, 2, F] (gate first) and down [E, F, D]; of one device, its share of E and F."""

    gate_up: jax.Array
    down: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertStack:
    """The experts' weights of a stack of R layers where they are kept, and the layer that reads there.

    A scan over layers hands each layer a copy of its weights. Of the experts, the bulk of a model, a decode step needs a few,
    and no pass needs the copy: values are read here one expert at a time, gradients belong to the layer's own weights.

    Attributes:
      gate_up: [R, E, D, 2, F].
      down: [R, E, F, D].
      layer: int32 scalar, None outside the scan.
    """

    gate_up: jax.Array
    down: jax.Array
    layer: jax.Array | None = None

    def at(self, layer: jax.Array) -> ExpertStack:
        """The same weights for another layer."""
        return replace(self, layer=layer)

    def operands(self) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
        """What `grouped_matmul` takes as its `stack`: of gate_up as [R, E, D, 2 F], and of down."""
        assert self.layer is not None
        return (self.gate_up.reshape(*self.gate_up.shape[:3], -1), self.layer), (self.down, self.layer)


class Experts(nnx.Module):
    """E gated MLPs: gate_up [E, D, 2, F] (gate first) and down [E, F, D]; `place` [E] where experts can move, else None."""

    def __init__(
        self,
        config: MoEConfig,
        hidden_size: int,
        intermediate_size: int,
        compute: ComputeConfig,
        *,
        initializer_range: float,
        rngs: nnx.Rngs,
        stack: int | None = None,
    ) -> None:
        self.dtypes = DtypePolicy.of(compute)
        init = normal(initializer_range)
        self.gate_up = parameter(
            rngs,
            (config.num_experts, hidden_size, 2, intermediate_size),
            ("expert", "expert_embed", None, "expert_mlp"),
            init=init,
            dtype=self.dtypes.param,
            stack=stack,
        )
        self.down = parameter(
            rngs,
            (config.num_experts, intermediate_size, hidden_size),
            ("expert", "expert_mlp", "expert_embed"),
            init=init,
            dtype=self.dtypes.param,
            stack=stack,
        )
        axes = ("router_experts",) if stack is None else ("layers", "router_experts")
        self.place = ExpertPlace(own_places(config.num_experts, stack), axes=axes) if compute.movable_experts else None

    def stack(self) -> ExpertStack | None:
        """The weights of a stack of these (with a leading `layers` axis), None where the mesh splits what one expert needs."""
        layout = current_layout()
        if layout is not None and (layout.shards("expert_embed") > 1 or layout.shards("layers") > 1):
            return None
        return jax.lax.stop_gradient(ExpertStack(self.gate_up[...], self.down[...]))

    def weights(self) -> ExpertWeights:
        """One layer's weights in the compute format."""
        return ExpertWeights(self.dtypes.cast(self.gate_up[...]), self.dtypes.cast(self.down[...]))
