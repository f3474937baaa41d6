"""The routed experts of one modality and their journey across the mesh.

B batch, T tokens, D model, F expert width, E experts, K chosen; g, t, f: one device's share of B, T, F; n = g t.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from ernie_jax.config.compute import ComputeConfig
from ernie_jax.config.model import MoEConfig
from ernie_jax.moe.capacity import row_capacity
from ernie_jax.moe.dispatch import Dispatcher, ExchangePlan, make_dispatcher
from ernie_jax.moe.grouped_matmul import grouped_matmul
from ernie_jax.moe.routing import Routing
from ernie_jax.nn.activation import ACTIVATION_FUNCTIONS
from ernie_jax.nn.dtypes import DtypePolicy
from ernie_jax.nn.parameter import normal, parameter
from ernie_jax.sharding import BATCH_AXES, Layout, current_layout


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

    def __call__(self, x: jax.Array, routing: Routing) -> jax.Array:
        """Each token's weighted sum of its experts' outputs.

        Args:
          x: [B, T, D].
          routing: [B, T, K]; entries equal to E go nowhere.

        Returns:
          [B, T, D], zero for tokens that go nowhere.
        """
        gate_up, down = self.dtypes.cast(self.gate_up[...]), self.dtypes.cast(self.down[...])
        routing = Routing(routing.expert_index, routing.weights.astype(x.dtype))
        layout = current_layout()
        if layout is None or layout.mesh.size == 1:
            dispatcher = make_dispatcher(self.compute.dispatch, ExchangePlan(num_experts=self.num_experts, shards=1))
            return self._on_device(x, routing, gate_up, down, dispatcher)
        return self._over_mesh(x, routing, gate_up, down, layout)

    def _over_mesh(self, x: jax.Array, routing: Routing, gate_up: jax.Array, down: jax.Array, layout: Layout) -> jax.Array:
        """The same under `shard_map` over the whole mesh: tokens over (data, expert), experts over expert, widths over tensor.

        The token spec is forced here whatever sharding x arrives with: taking it from x could repeat tokens unnoticed.
        """
        groups, tensor = layout.axis_size(*BATCH_AXES), layout.axis_size("tensor")
        original, (batch, tokens, dim) = x.shape, x.shape
        rows_intact = batch % groups == 0
        if not (rows_intact and tokens % tensor == 0):
            # Sizes the mesh does not divide: pad the flat tokens to a grid that it does; padding is routed nowhere.
            x, routing = _as_grid(x, routing, groups, tensor, self.num_experts)
        plan = ExchangePlan(
            num_experts=self.num_experts,
            shards=layout.shards("expert"),
            bucket_rows=self._bucket_rows(batch // groups, tokens, routing, layout) if rows_intact else None,
        )
        dispatcher = make_dispatcher(self.compute.dispatch, plan)
        sequence_sharded = "tensor" in layout.rules.mesh_axes("sequence")
        rows = PartitionSpec(BATCH_AXES)
        spec = layout.rules.spec

        def body(x: jax.Array, routing: Routing, gate_up: jax.Array, down: jax.Array) -> jax.Array:
            y = self._on_device(x, routing, gate_up, down, dispatcher)
            if tensor == 1:
                return y
            # Each tensor shard holds the products of its slice of the expert width: add them, and keep only
            # this shard's part of the sequence where that is how activations are laid out.
            if sequence_sharded:
                return jax.lax.psum_scatter(y, "tensor", scatter_dimension=1, tiled=True)
            return jax.lax.psum(y, "tensor")

        y = jax.shard_map(
            body,
            mesh=layout.mesh,
            in_specs=(
                rows,
                Routing(rows, rows),  # type: ignore[arg-type]
                spec(("expert", None, None, "expert_mlp")),
                spec(("expert", "expert_mlp", None)),
            ),
            out_specs=PartitionSpec(BATCH_AXES, "tensor") if sequence_sharded else rows,
            # Nested in manual pipeline stages the check fails to lower; gradients are compared with one device instead.
            check_vma=False,
        )(x, routing, gate_up, down)
        return y if y.shape == original else y.reshape(-1, dim)[: batch * tokens].reshape(original)

    def _bucket_rows(self, rows: int, tokens: int, routing: Routing, layout: Layout) -> int | None:
        """Most tokens one device can send to one peer under the capacity factor, None without one."""
        factor = self.compute.capacity_factor
        if factor is None:
            return None
        per_expert = row_capacity(tokens, self.num_experts, routing.expert_index.shape[-1], factor)
        return rows * min(tokens, per_expert * (self.num_experts // layout.shards("expert")))

    def _on_device(self, x: jax.Array, routing: Routing, gate_up: jax.Array, down: jax.Array, dispatcher: Dispatcher) -> jax.Array:
        """[g, t, D] with this device's experts gate_up [E_local, D, 2, f], down [E_local, f, D] -> [g, t, D]."""
        groups, tokens, dim = x.shape
        flat = jax.tree.map(lambda a: a.reshape(groups * tokens, a.shape[-1]), routing)
        rows, sizes, residuals = dispatcher.dispatch(x.reshape(groups * tokens, dim), flat)
        rows = checkpoint_name(rows, "expert_in")
        product = functools.partial(grouped_matmul, group_sizes=sizes, backend=self.compute.grouped_matmul)
        width = gate_up.shape[-1]
        with jax.named_scope("experts"):
            hidden = checkpoint_name(product(rows, gate_up.reshape(gate_up.shape[0], dim, 2 * width)), "expert_gate_up")
            hidden = ACTIVATION_FUNCTIONS[self.hidden_act](hidden[:, :width]) * hidden[:, width:]
            out = product(checkpoint_name(hidden, "expert_act"), down)
        return dispatcher.combine(out, residuals).reshape(groups, tokens, dim)


def _as_grid(x: jax.Array, routing: Routing, groups: int, tensor: int, num_experts: int) -> tuple[jax.Array, Routing]:
    """[B, T, ...] as [groups, tokens', ...] with tokens' a multiple of `tensor`, the added tokens routed nowhere."""
    count = x.shape[0] * x.shape[1]
    each = math.ceil(count / (groups * tensor)) * tensor
    extra = groups * each - count

    def grid(a: jax.Array, fill: float) -> jax.Array:
        flat = a.reshape(count, a.shape[-1])
        return jnp.pad(flat, ((0, extra), (0, 0)), constant_values=fill).reshape(groups, each, a.shape[-1])

    return grid(x, 0), Routing(grid(routing.expert_index, num_experts), grid(routing.weights, 0))
