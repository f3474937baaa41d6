"""Rematerialisation policies by name, over the `checkpoint_name` tags of the layers.

Tags: `qkv` and `attn_out` (attention), `mlp_gate_up` (dense MLP), `expert_in`, `expert_gate_up`, `expert_act` (routed experts),
`vit_qkv`, `vit_attn_out`, `vit_act` (blocks of the vision tower).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

TAGS = (
    "qkv",
    "attn_out",
    "mlp_gate_up",
    "expert_in",
    "expert_gate_up",
    "expert_act",
    "vit_qkv",
    "vit_attn_out",
    "vit_act",
)


def rematerialize(body: Callable[..., Any], policy: str | tuple[str, ...]) -> Callable[..., Any]:
    """`body` with its activations recomputed in the backward pass as the policy says.

    Args:
      body: the function of one repetition of a layer stack, run inside `lax.scan`.
      policy: `none` keeps everything, `full` keeps only the body's inputs, a tuple of tags keeps inputs and those tensors.

    Raises:
      ValueError: an unknown policy or tag, with those that exist.
    """
    if policy == "none":
        return body
    if policy == "full":
        return jax.checkpoint(body, prevent_cse=False)
    if isinstance(policy, str):
        raise ValueError(f"unknown remat policy {policy!r}; expected 'none', 'full' or a list of tags from {TAGS}")
    unknown = [tag for tag in policy if tag not in TAGS]
    if unknown:
        raise ValueError(f"remat policy names unknown tags {unknown}; expected tags from {TAGS}")
    # Inside a scan the loop itself keeps the two copies of the body apart.
    return jax.checkpoint(body, prevent_cse=False, policy=jax.checkpoint_policies.save_only_these_names(*policy))
