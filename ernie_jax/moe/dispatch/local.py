"""The dispatcher of a device that holds all its tokens' experts: sort, and nothing to send. n tokens, K chosen, A = n K."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ernie_jax.moe.dispatch.protocol import ExchangePlan
from ernie_jax.moe.permute import expand, permute, sort_by_expert
from ernie_jax.moe.routing import Routing


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LocalResiduals:
    """What brings results back: the sort, its inverse, and the mixing weights [n, K]."""

    order: jax.Array
    inverse: jax.Array
    weights: jax.Array


@dataclass(frozen=True)
class LocalDispatcher:
    """Expert axis of size 1; also the last step of every other dispatcher, with its device's experts and indices."""

    plan: ExchangePlan

    def dispatch(self, x: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array, LocalResiduals]:
        """x [n, D] -> rows [n K, D] sorted by expert; see `Dispatcher`."""
        with jax.named_scope("moe_sort"):
            order, inverse, sizes = sort_by_expert(routing.expert_index.reshape(-1), self.plan.num_experts)
            rows = expand(x, order, inverse)
        return rows, sizes, LocalResiduals(order, inverse, routing.weights)

    def combine(self, outputs: jax.Array, residuals: LocalResiduals) -> jax.Array:
        """outputs [n K, D] -> [n, D]: each token's sum of its rows times its weights."""
        n, k = residuals.weights.shape
        with jax.named_scope("moe_combine"):
            unsorted = permute(outputs, residuals.inverse, residuals.order).reshape(n, k, -1)
            return jnp.einsum("nkd,nk->nd", unsorted, residuals.weights.astype(outputs.dtype))
