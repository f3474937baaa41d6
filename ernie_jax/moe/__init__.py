"""Router, losses, balance, grouped matmul, dispatch and the mixture-of-experts layer."""

from ernie_jax.moe.balance import balance_rate, update_bias
from ernie_jax.moe.block import MoE
from ernie_jax.moe.experts import ExpertStack
from ernie_jax.moe.fp8_experts import OPERANDS as FP8_OPERANDS
from ernie_jax.moe.losses import gate_cosine, load_balance_loss, orthogonal_loss, transformers_auxiliary_loss, z_loss
from ernie_jax.moe.router import RouterBias
from ernie_jax.moe.routing import RouterOutput, RouterStats, Routing

__all__ = [
    "FP8_OPERANDS",
    "ExpertStack",
    "MoE",
    "RouterBias",
    "RouterOutput",
    "RouterStats",
    "Routing",
    "balance_rate",
    "gate_cosine",
    "load_balance_loss",
    "orthogonal_loss",
    "transformers_auxiliary_loss",
    "update_bias",
    "z_loss",
]
