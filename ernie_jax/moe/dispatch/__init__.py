"""Dispatchers by name, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable

from ernie_jax.moe.dispatch.all_to_all import AllToAllDispatcher
from ernie_jax.moe.dispatch.boundary import on_each_device, shard_major
from ernie_jax.moe.dispatch.local import LocalDispatcher
from ernie_jax.moe.dispatch.packed_rows import ExchangeFormats, exchange_formats
from ernie_jax.moe.dispatch.protocol import Dispatcher, ExchangePlan, Residuals
from ernie_jax.moe.dispatch.ragged import RaggedDispatcher
from ernie_jax.moe.dispatch.replicated import ReplicatedDispatcher
from ernie_jax.moe.dispatch.two_level import two_level

DISPATCHERS: dict[str, Callable[[ExchangePlan], Dispatcher]] = {
    "local": LocalDispatcher,
    "replicated": ReplicatedDispatcher,
    "all_to_all": AllToAllDispatcher,
    "ragged": RaggedDispatcher,
    "two_level": two_level,
}


def make_dispatcher(name: str, plan: ExchangePlan) -> Dispatcher:
    """The dispatcher called `name`; `auto` is `local` for one shard and `all_to_all` otherwise.

    Raises:
      ValueError: an unknown name; `local` with experts split over several devices; `ragged` on a backend without it; `two_level`
        without a number of nodes that fits.
    """
    if name == "auto":
        name = "local" if plan.shards == 1 else "all_to_all"
    if name not in DISPATCHERS:
        raise ValueError(f"unknown dispatch {name!r}; expected 'auto' or one of {sorted(DISPATCHERS)}")
    if name == "local" and plan.shards > 1:
        raise ValueError(
            f"dispatch='local' keeps every token on its device, but the experts are split over {plan.shards} devices "
            f"(mesh axis {plan.axis!r}); use 'all_to_all', 'replicated' or 'auto'"
        )
    return DISPATCHERS[name](plan)


__all__ = [
    "DISPATCHERS",
    "AllToAllDispatcher",
    "Dispatcher",
    "ExchangeFormats",
    "ExchangePlan",
    "LocalDispatcher",
    "RaggedDispatcher",
    "ReplicatedDispatcher",
    "Residuals",
    "exchange_formats",
    "make_dispatcher",
    "on_each_device",
    "shard_major",
]
