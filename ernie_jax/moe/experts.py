"""The routed experts of one modality. B batch, T tokens, D model, F width, E experts, K chosen; g, t, f: one device's share."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ernie_jax.config.compute import ComputeConfig
from ernie_jax.config.model import MoEConfig
from ernie_jax.moe.dispatch import ExchangePlan, make_dispatcher, on_each_device
from ernie_jax.moe.grouped_matmul import grouped_matmul
from ernie_jax.moe.routing import Routing
from ernie_jax.nn.activation import gated
from ernie_jax.nn.dtypes import DtypePolicy
from ernie_jax.nn.parameter import normal, parameter
from ernie_jax.sharding import current_layout

# What the backward pass of `remat="none"` keeps: the rest is cheaper to compute again than to write and read.
_KEEP = jax.checkpoint_policies.save_only_these_names("expert_gate_up", "expert_sort", "expert_received")


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
    """E gated MLPs: gate_up [E, D, 2, F] (gate first) and down [E, F, D]."""

    def __init__(
        self,
        config: MoEConfig,
        hidden_size: int,
        intermediate_size: int,
        compute: ComputeConfig,
        *,
        hidden_act: str,
        initializer_range: float,
        rngs: nnx.Rngs,
        stack: int | None = None,
    ) -> None:
        self.num_experts = config.num_experts
        self.hidden_act = hidden_act
        self.compute = compute
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

    def stack(self) -> ExpertStack | None:
        """The weights of a stack of these (with a leading `layers` axis), None where the mesh splits what one expert needs."""
        layout = current_layout()
        if layout is not None and (layout.shards("expert_embed") > 1 or layout.shards("layers") > 1):
            return None
        return jax.lax.stop_gradient(ExpertStack(self.gate_up[...], self.down[...]))

    def __call__(self, x: jax.Array, routing: Routing, stack: ExpertStack | None = None) -> jax.Array:
        """Each token's weighted sum of its experts' outputs.

        Args:
          x: [B, T, D].
          routing: [B, T, K]; entries equal to E go nowhere.
          stack: this layer's weights among others, to be read in place.

        Returns:
          [B, T, D], zero for tokens that go nowhere.
        """
        gate_up, down = self.dtypes.cast(self.gate_up[...]), self.dtypes.cast(self.down[...])
        routing = Routing(routing.expert_index, routing.weights.astype(x.dtype))
        layout = current_layout()
        on_device = self._on_device
        if self.compute.remat == "none":
            on_device = jax.checkpoint(on_device, static_argnums=5, prevent_cse=False, policy=_KEEP)
        if layout is None or layout.mesh.size == 1:
            return on_device(x, routing, gate_up, down, stack, ExchangePlan(num_experts=self.num_experts, shards=1))
        return on_each_device(on_device, x, routing, gate_up, down, stack, layout, self.compute.capacity_factor)

    def _on_device(
        self, x: jax.Array, routing: Routing, gate_up: jax.Array, down: jax.Array, stack: ExpertStack | None, plan: ExchangePlan
    ) -> jax.Array:
        """[g, t, D] with this device's experts gate_up [E_local, D, 2, f], down [E_local, f, D] -> [g, t, D]."""
        dispatcher = make_dispatcher(self.compute.dispatch, plan)
        groups, tokens, dim = x.shape
        flat = jax.tree.map(lambda a: a.reshape(groups * tokens, a.shape[-1]), routing)
        rows, sizes, residuals = dispatcher.dispatch(x.reshape(groups * tokens, dim), flat)
        row_weights, residuals = residuals.take_weights()
        rows = checkpoint_name(rows, "expert_in")
        product = functools.partial(grouped_matmul, group_sizes=sizes, backend=self.compute.grouped_matmul)
        width = gate_up.shape[-1]
        with jax.named_scope("experts"):
            first, second = (None, None) if stack is None else stack.operands()
            hidden = product(rows, gate_up.reshape(gate_up.shape[0], dim, 2 * width), stack=first)
            hidden = checkpoint_name(hidden, "expert_gate_up")
            hidden = gated(hidden.reshape(-1, 2, width), self.hidden_act) * row_weights[:, None].astype(hidden.dtype)
            out = product(checkpoint_name(hidden, "expert_act"), down, stack=second)
        return dispatcher.combine(out, residuals).reshape(groups, tokens, dim)
