"""Policies by name: which tags each keeps, and what is said of one that does not exist."""

import dataclasses

import pytest

from ernie_jax.config import ComputeConfig, default_config, run_config_from
from ernie_jax.config.remat import TAGS, recompute_experts, remat_plan, remat_within

ATTENTION = {"qkv", "attn_out", "attn_log_sum"}
EXCHANGE = {"router", "expert_sort", "expert_received"}
VISION = {"vit_qkv", "vit_attn_out", "vit_attn_log_sum", "vit_residual", "vit_act"}
REST = {"residual", "mlp_gate_up", "expert_gate_up", "vision_expert_gate_up"}
ALL = ATTENTION | EXCHANGE | VISION | REST


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ("full", set()),
        ("attention", ALL - ATTENTION),
        ("experts", ALL - {"expert_gate_up"}),
        ("vision", ALL - VISION - {"vision_expert_gate_up"}),
        ("attention=full,exchange=full", ALL - ATTENTION - EXCHANGE),
        # The stream between attention and the rest goes only when both sides do.
        ("attention=full, mlp=full, exchange=full", ALL - ATTENTION - EXCHANGE - {"mlp_gate_up", "residual"}),
        (("qkv", "expert_act"), {"qkv", "expert_act"}),
    ],
)
def test_what_a_policy_keeps(policy, kept):
    plan = remat_plan(policy)
    assert set(plan.saved) == kept and not plan.offloaded and not plan.everything


def test_none_keeps_everything():
    assert remat_plan("none").everything and remat_plan("attention=none,mlp=none").everything


def test_offload_moves_what_is_large_and_keeps_what_is_small():
    plan = remat_plan("offload")
    assert set(plan.saved) == {"attn_log_sum", "vit_attn_log_sum", "router", "expert_sort"}
    assert set(plan.saved) | set(plan.offloaded) == ALL
    mixed = remat_plan("experts=offload,attention=full")
    assert mixed.offloaded == ("expert_gate_up",) and set(mixed.saved) == ALL - ATTENTION - {"expert_gate_up"}


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("expert", r"unknown remat policy 'expert' \(did you mean 'experts'\?\); expected one of none, full, attention, experts"),
        ("attn=full", r"unknown kind 'attn' .*expected attention, mlp, exchange, experts, vision_experts, vision_block"),
        ("attention=fully", r"attention='fully' \(did you mean 'full'\?\); expected none, full, offload"),
        (("qkv", "attn"), r"unknown tags \['attn'\].*expected tags from qkv, attn_out"),
    ],
)
def test_bad_names_are_answered_with_the_known_ones(policy, message):
    with pytest.raises(ValueError, match=message):
        ComputeConfig(remat=policy)


def test_a_block_that_a_policy_leaves_alone_has_none():
    assert remat_within("vision", ("attention", "mlp")) == "none"
    assert remat_within("vision", ("exchange", "experts", "vision_experts")) == "vision"
    assert remat_within("auto", ("attention",)) == "auto" and remat_within(("qkv",), ("mlp",)) == ("qkv",)


def test_experts_recomputed_besides():
    assert set(remat_plan(recompute_experts("none")).saved) == ALL - {"expert_gate_up", "vision_expert_gate_up"}
    assert set(remat_plan(recompute_experts("attention")).saved) == ALL - ATTENTION - {"expert_gate_up", "vision_expert_gate_up"}
    assert recompute_experts("full") == "full"
    assert recompute_experts(("qkv", "expert_gate_up")) == ("qkv",)


def test_a_recipe_takes_every_form():
    config = default_config()
    config.data.kind = "standard_library"
    for policy in ("auto", "attention=full,experts=none", ("qkv", "attn_out")):
        config.remat = policy
        assert run_config_from(config).remat == policy
    run = run_config_from(config)
    assert (run.remat_budget, run.remat_on_imbalance, run.device_memory_bytes) == (0.85, 0.15, None)
    for changes in ({"remat_budget": 0.0}, {"remat_budget": 1.5}, {"remat_on_imbalance": -0.1}, {"device_memory_bytes": 0}):
        with pytest.raises(ValueError, match=rf"config\.{next(iter(changes))}"):
            dataclasses.replace(run, **changes)
    assert len(TAGS) == len(set(TAGS))
