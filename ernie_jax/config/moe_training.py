"""Routing, exchange and balance of a run's experts."""

from __future__ import annotations

from dataclasses import dataclass

from ernie_jax.config.bounds import at_least
from ernie_jax.config.compute import EXCHANGE_FIELDS, GROUPED_MATMUL, check_exchange, one_of


@dataclass(frozen=True, kw_only=True)
class MoETrainConfig:
    """Routing and balance during training.

    Attributes:
      dispatch, exchange_dtype, exchange_backward, exchange_chunks, exchange_order, expert_nodes, grouped_matmul,
      capacity_factor, router_temperature: see ComputeConfig.
      aux_loss_coef, z_loss_coef, orthogonal_coef: weights of the router losses, 0 leaves one out.
      orthogonal_form: `loss` adds the orthogonal loss to the objective; `step` subtracts its gradient from the gate after the
        optimiser, not scaled by the learning rate.
      orthogonal_groups: compare gate rows only within this many groups of experts; 1 compares all.
      bias_update_rate: step of the aux-free correction bias, once an optimiser step; 0 leaves it.
      freeze_gate: no update of the gate, and so none of its bias.
      freeze_bias: no update of the correction bias.
      balance_scope: `step` takes the load-balance frequencies from the whole optimiser step, exact however the batch is
        accumulated, for an extra forward pass when it is; `microbatch` from each microbatch, as the published recipes.
      balance_window: averages of balance rates are over this many of the latest steps.
      placement_every: after each so many steps, move experts between the devices of the `expert` axis by their load since the
        last time, so that the fullest device has less to do; 0 never.
      placement_nodes: nodes that the `expert` axis spans, in equal runs of devices; they are balanced first.
      placement_threshold: move experts of a layer only where the load of its fullest device falls by this share.
    """

    dispatch: str = "auto"
    exchange_dtype: str | None = None
    exchange_backward: str | None = None
    exchange_chunks: int = 1
    exchange_order: str = "together"
    expert_nodes: int | None = None
    grouped_matmul: str = "auto"
    capacity_factor: float | None = None
    router_temperature: float = 1.0
    aux_loss_coef: float = 1e-5
    z_loss_coef: float = 0.0
    orthogonal_coef: float = 0.0
    orthogonal_form: str = "loss"
    orthogonal_groups: int = 1
    bias_update_rate: float = 1e-3
    freeze_gate: bool = False
    freeze_bias: bool = False
    balance_scope: str = "step"
    balance_window: int = 100
    placement_every: int = 0
    placement_nodes: int = 1
    placement_threshold: float = 0.02

    def __post_init__(self) -> None:
        check_exchange("config.moe", **{name: getattr(self, name) for name in EXCHANGE_FIELDS})
        one_of("config.moe", "grouped_matmul", self.grouped_matmul, GROUPED_MATMUL)
        one_of("config.moe", "orthogonal_form", self.orthogonal_form, ("loss", "step"))
        one_of("config.moe", "balance_scope", self.balance_scope, ("step", "microbatch"))
        coefficients = ("aux_loss_coef", "z_loss_coef", "orthogonal_coef", "bias_update_rate")
        at_least("config.moe", 0.0, **{name: getattr(self, name) for name in coefficients})
        at_least("config.moe", 1, orthogonal_groups=self.orthogonal_groups, balance_window=self.balance_window)
        at_least("config.moe", 0, placement_every=self.placement_every)
        at_least("config.moe", 1, placement_nodes=self.placement_nodes)
        if not 0 <= self.placement_threshold < 1:
            raise ValueError(f"config.moe.placement_threshold={self.placement_threshold}; expected a share in [0, 1)")
