"""The gated MLP of dense layers and of shared experts. B batch, T tokens, D model, F width."""

from __future__ import annotations

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ernie_jax.nn.activation import gated
from ernie_jax.nn.dtypes import DtypePolicy
from ernie_jax.nn.parameter import normal, parameter
from ernie_jax.nn.projection import project
from ernie_jax.sharding import constrain, constrain_cotangent


class GatedMLP(nnx.Module):
    """`down(act(gate x) * (up x))`, gate and up in one product.

    gate_up is [D, 2, F] (gate first), so that a tensor shard of F holds matching halves of both.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        hidden_act: str,
        initializer_range: float,
        dtypes: DtypePolicy,
        rngs: nnx.Rngs,
        stack: int | None = None,
    ) -> None:
        self.hidden_act = hidden_act
        self.dtypes = dtypes
        init = normal(initializer_range)
        self.gate_up = parameter(
            rngs, (hidden_size, 2, intermediate_size), ("embed", None, "mlp"), init=init, dtype=dtypes.param, stack=stack
        )
        self.down = parameter(rngs, (intermediate_size, hidden_size), ("mlp", "embed"), init=init, dtype=dtypes.param, stack=stack)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D]."""
        x = constrain(x, "batch", "full_sequence", "activation_embed")
        gate_up = project(x, self.dtypes.cast(self.gate_up[...]))
        gate_up = checkpoint_name(constrain(gate_up, "batch", "full_sequence", None, "activation_mlp"), "mlp_gate_up")
        hidden = gated(gate_up, self.hidden_act)
        out = project(hidden, self.dtypes.cast(self.down[...]))
        out = constrain_cotangent(out, "batch", "full_sequence", "activation_embed")
        return constrain(out, "batch", "sequence", "activation_embed")
