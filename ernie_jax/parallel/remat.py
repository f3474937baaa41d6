"""Rematerialisation policies over the `checkpoint_name` tags of the layers (the table of `config/remat.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ernie_jax.config.remat import Remat, RematPlan, remat_plan
from ernie_jax.sharding import current_layout

# Where host memory is another memory than the device's, and XLA moves tensors between the two. On CPU the memory kind
# `pinned_host` exists, but nothing is moved (jax 0.10 and 0.12).
HOST_MEMORY_PLATFORMS = ("gpu", "tpu")


def rematerialize(body: Callable[..., Any], policy: Remat, *, repeats: int = 2, branches: bool = False) -> Callable[..., Any]:
    """`body` with its activations recomputed in the backward pass as the policy says.

    Args:
      body: the function of one repetition of a layer stack, run inside `lax.scan`.
      policy: `none` keeps everything, `full` only the body's inputs; all others inputs and the tensors of their tags.
      repeats: rounds of that scan.
      branches: whether the body is a branch that is taken or not.

    Raises:
      ValueError: an unknown policy or tag, with those that exist; offloading on a backend without host memory of its own.
    """
    plan = remat_plan(policy)
    if plan.everything:
        # A scan keeps once what is the same in all rounds, but what comes out of a branch it takes to differ.
        return jax.checkpoint(body, prevent_cse=False, policy=_all_but_fills) if branches else body
    layout = current_layout()
    check_host_memory(policy, jax.default_backend() if layout is None else layout.mesh.devices.flat[0].platform)
    # Inside a scan the loop itself keeps the two copies of the body apart; but a loop of one round is none to the compiler.
    return jax.checkpoint(body, prevent_cse=repeats == 1, policy=checkpoint_policy(plan))


def _all_but_fills(primitive: Any, *_: Any, **__: Any) -> bool:
    """Keeps everything that is not one number repeated, which costs nothing to make again."""
    return primitive.name != "broadcast_in_dim"


def checkpoint_policy(plan: RematPlan) -> Callable[..., Any] | None:
    """What `jax.checkpoint` is told; None keeps nothing but inputs."""
    policies = jax.checkpoint_policies
    if plan.offloaded:
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(plan.saved),
            names_which_can_be_offloaded=list(plan.offloaded),
            offload_src="device",
            offload_dst="pinned_host",
        )
    return policies.save_only_these_names(*plan.saved) if plan.saved else None


def check_host_memory(policy: Remat, platform: str) -> None:
    """Refuses to offload where nothing can be offloaded to.

    Raises:
      ValueError: with the backend's name.
    """
    if remat_plan(policy).offloaded and platform not in HOST_MEMORY_PLATFORMS:
        raise ValueError(
            f"remat={policy!r} moves tensors to host memory, which the backend {platform!r} does not have apart from its own "
            f"(expected one of {', '.join(HOST_MEMORY_PLATFORMS)}); use 'full', or 'attention', 'experts' and 'vision'"
        )
