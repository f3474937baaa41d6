"""The dispatcher of a device that holds all its tokens' experts: sort, and nothing to send. n tokens, K chosen, R rows.

R is n K, or fewer where the plan knows that no more assignments than that go to an expert.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ernie_jax.moe.dispatch.protocol import ExchangePlan
from ernie_jax.moe.permute import collect, expand, permute, sort_by_expert
from ernie_jax.moe.routing import Routing


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LocalResiduals:
    """What brings results back: the sort [R], its inverse [n, K], and the mixing weights [n, K] (None once taken)."""

    order: jax.Array
    inverse: jax.Array
    weights: jax.Array | None

    def take_weights(self) -> tuple[jax.Array, LocalResiduals]:
        """See `Residuals`."""
        assert self.weights is not None
        return permute(self.weights.reshape(-1), self.order, self.inverse.reshape(-1)), replace(self, weights=None)


@dataclass(frozen=True)
class LocalDispatcher:
    """Expert axis of size 1; also the last step of every other dispatcher, with its device's experts and indices."""

    plan: ExchangePlan

    def dispatch(self, x: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array, LocalResiduals]:
        """x [n, D] -> rows [R, D] sorted by expert; see `Dispatcher`."""
        with jax.named_scope("moe_sort"):
            order, *sort = sort_by_expert(routing.expert_index.reshape(-1), self.plan.num_experts)
            # Those that go nowhere are sorted behind all others.
            order, inverse, sizes = (checkpoint_name(a, "expert_sort") for a in (order[: self.plan.expert_rows], *sort))
            rows = expand(x, order, inverse)
        return rows, sizes, LocalResiduals(order, inverse.reshape(routing.weights.shape), routing.weights)

    def combine(self, outputs: jax.Array, residuals: LocalResiduals) -> jax.Array:
        """outputs [R, D] -> [n, D]: each token's sum of its rows times its weights."""
        with jax.named_scope("moe_combine"):
            if residuals.weights is None:
                return collect(outputs, residuals.order, residuals.inverse)
            unsorted = permute(outputs, residuals.inverse.reshape(-1), residuals.order)
            unsorted = unsorted.reshape(*residuals.weights.shape, -1)
            return jnp.einsum("nkd,nk->nd", unsorted, residuals.weights.astype(outputs.dtype))
