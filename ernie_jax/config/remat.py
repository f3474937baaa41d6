"""Rematerialisation by name: what the backward pass of each kind of block finds kept, and what it computes again.

A policy recomputes some kinds of blocks and keeps the others. Of a kind that is kept, the tensors with its tags are kept, and
what lies between them (norms, activations, attention scores) is made again from them, which costs no product of weights.

| kind | tags of what is kept |
|---|---|
| `attention` | `qkv`, `attn_out`, `attn_log_sum` (chunked kernel), `residual` |
| `mlp` (dense layers, shared experts) | `mlp_gate_up`, `residual` |
| `exchange` (router, sort, sent rows) | `router`, `expert_sort`, `expert_received`, `residual` |
| `experts` (of text) | `expert_gate_up` |
| `vision_experts` | `vision_expert_gate_up` |
| `vision_block` (of the vision tower) | `vit_qkv`, `vit_attn_out`, `vit_attn_log_sum`, `vit_residual`, `vit_act` |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ernie_jax.config.nearest import did_you_mean

Remat = str | tuple[str, ...]

# A tag of several kinds is kept as long as one of them is: `residual`, the stream between attention and what follows, is what
# both sides of it would be recomputed from.
TAGS_OF_KIND: Mapping[str, tuple[str, ...]] = {
    "attention": ("qkv", "attn_out", "attn_log_sum", "residual"),
    "mlp": ("mlp_gate_up", "residual"),
    "exchange": ("router", "expert_sort", "expert_received", "residual"),
    "experts": ("expert_gate_up",),
    "vision_experts": ("vision_expert_gate_up",),
    "vision_block": ("vit_qkv", "vit_attn_out", "vit_attn_log_sum", "vit_residual", "vit_act"),
}
KINDS = tuple(TAGS_OF_KIND)
# Rows gathered from tokens and activations of gated units are cheaper to make again than to read; a list may name them.
_ONLY_BY_LIST = ("expert_in", "expert_act", "vision_expert_act")
TAGS = (*dict.fromkeys(tag for tags in TAGS_OF_KIND.values() for tag in tags), *_ONLY_BY_LIST)
# Too small to be worth a way to the host and back.
_STAYS_ON_DEVICE = ("attn_log_sum", "vit_attn_log_sum", "router", "expert_sort")

MODES = ("none", "full", "offload")
# Policy -> what becomes of each kind; kinds not named are kept.
POLICIES: dict[str, dict[str, str]] = {
    "none": {},
    "full": dict.fromkeys(KINDS, "full"),
    "attention": {"attention": "full"},
    "experts": {"experts": "full"},
    "vision": {"vision_experts": "full", "vision_block": "full"},
    "offload": dict.fromkeys(KINDS, "offload"),
}


@dataclass(frozen=True)
class RematPlan:
    """What a policy keeps: `saved` tags on the device, `offloaded` ones in host memory; `everything` is all there is."""

    saved: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    everything: bool = False


def modes_of_kinds(policy: str) -> dict[str, str]:
    """Kind -> `none`, `full` or `offload` under a policy by name or by kind (`attention=full,experts=offload`).

    Raises:
      ValueError: an unknown policy, kind or mode, with those that exist; `auto`, which stands for none until it is chosen.
    """
    if policy in POLICIES:
        return dict.fromkeys(KINDS, "none") | POLICIES[policy]
    if policy == "auto":
        raise ValueError("remat='auto' is a choice still to be made; see train.remat_choice.choose_remat")
    if "=" not in policy:
        raise ValueError(
            f"unknown remat policy {policy!r}{did_you_mean(policy, (*POLICIES, 'auto'))}; expected one of "
            f"{', '.join(POLICIES)}, auto, kinds with what becomes of them ('attention=full,experts=none'), or a list of tags"
        )
    modes = dict.fromkeys(KINDS, "none")
    for part in policy.split(","):
        kind, _, mode = (word.strip() for word in part.partition("="))
        if kind not in KINDS:
            raise ValueError(f"remat={policy!r}: unknown kind {kind!r}{did_you_mean(kind, KINDS)}; expected {', '.join(KINDS)}")
        if mode not in MODES:
            raise ValueError(f"remat={policy!r}: {kind}={mode!r}{did_you_mean(mode, MODES)}; expected {', '.join(MODES)}")
        modes[kind] = mode
    return modes


def remat_plan(policy: Remat) -> RematPlan:
    """What a policy keeps.

    Args:
      policy: a name of POLICIES, kinds with modes, or a list of tags.

    Raises:
      ValueError: an unknown policy, kind, mode or tag, with those that exist.
    """
    if not isinstance(policy, str):
        unknown = [tag for tag in policy if tag not in TAGS]
        if unknown:
            raise ValueError(
                f"remat names unknown tags {unknown}{did_you_mean(str(unknown[0]), TAGS)}; expected tags from {', '.join(TAGS)}"
            )
        return RematPlan(saved=tuple(policy))
    modes = modes_of_kinds(policy)
    if set(modes.values()) == {"none"}:
        return RematPlan(everything=True)
    kept = _tags(kind for kind, mode in modes.items() if mode == "none")
    moved = _tags(kind for kind, mode in modes.items() if mode == "offload")
    offloaded = tuple(tag for tag in moved if tag not in kept and tag not in _STAYS_ON_DEVICE)
    return RematPlan((*kept, *(tag for tag in moved if tag not in kept and tag in _STAYS_ON_DEVICE)), offloaded)


def remat_within(policy: Remat, kinds: Iterable[str]) -> Remat:
    """The policy of a block made of these kinds: `none` where it leaves all of them alone, else itself."""
    if isinstance(policy, str) and policy != "auto":
        modes = modes_of_kinds(policy)
        return policy if any(modes[kind] != "none" for kind in kinds) else "none"
    return policy


def recompute_experts(policy: Remat) -> Remat:
    """The policy with the activations of all experts recomputed as well; itself where they already are."""
    if not isinstance(policy, str):
        return tuple(tag for tag in policy if "gate_up" not in tag or tag == "mlp_gate_up")
    modes = modes_of_kinds(policy)
    wanted = modes | {kind: "full" for kind in ("experts", "vision_experts") if modes[kind] == "none"}
    return policy if wanted == modes else ",".join(f"{kind}={mode}" for kind, mode in wanted.items() if mode != "none")


def _tags(kinds: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(tag for kind in kinds for tag in TAGS_OF_KIND[kind]))
