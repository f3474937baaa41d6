"""Tiny models, the one-device oracle, and counters of collectives: for tests, benches and notebooks."""

from ernie_jax.testing.configs import tiny_dense, tiny_moe, tiny_vl
from ernie_jax.testing.gradients import Evaluation, loss_and_gradients, random_batch, worst_difference
from ernie_jax.testing.hlo import COLLECTIVES, Collective, collectives, count_collectives
from ernie_jax.testing.multimodal import BATCHES, MultimodalRows, multimodal_rows
from ernie_jax.testing.oracle import oracle_logits, oracle_moe, oracle_mtp_logits

__all__ = [
    "BATCHES",
    "COLLECTIVES",
    "Collective",
    "Evaluation",
    "MultimodalRows",
    "collectives",
    "count_collectives",
    "loss_and_gradients",
    "multimodal_rows",
    "oracle_logits",
    "oracle_moe",
    "oracle_mtp_logits",
    "random_batch",
    "tiny_dense",
    "tiny_moe",
    "tiny_vl",
    "worst_difference",
]
