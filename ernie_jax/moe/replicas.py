"""More than one copy of the experts that many tokens want, for serving. E experts, G devices, N nodes, S slots a device.

Serving does not train, so an expert may stand on several devices, each doing its part of the tokens. The copies are counted from
the load, and packed by node, then by device (hierarchical expert-parallel load balance, as DeepSeek published it with its V3).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ernie_jax.moe.packing import bin_weights, deal, swap


@dataclass(frozen=True)
class ReplicaPlan:
    """Which expert each slot holds.

    Attributes:
      experts: [G, S] int, the expert of each slot of each device, ascending on a device; all different there.
      copies: [E] int, how many slots hold each expert, at least 1.
    """

    experts: np.ndarray
    copies: np.ndarray

    def device_loads(self, load: np.ndarray) -> np.ndarray:
        """[G], when the copies of an expert share its load [E] equally."""
        shares: np.ndarray = (np.asarray(load, np.float64) / self.copies)[self.experts].sum(-1)
        return shares


def plan_replicas(load: np.ndarray, *, slots: int, devices: int, nodes: int = 1) -> ReplicaPlan:
    """Fills the G S slots so that the fullest device has little.

    With w the largest load of one copy, the fullest device has at most mean + w on one node, and mean + w (1 + N / G) on several;
    and w is at most total load / (G S - E + 1), unless an expert with a copy on every device still has more.

    Args:
      load: [E] measured load, of the experts of one layer and modality.
      slots: S; G S is at least E.
      devices: G.
      nodes: N, which divides G.

    Raises:
      ValueError: fewer slots than experts, more than G copies of everything, or nodes that do not divide the devices.
    """
    load = np.asarray(load, np.float64)
    if nodes < 1 or devices < 1 or devices % nodes:
        raise ValueError(f"{devices} devices cannot be split over {nodes} nodes; the nodes must divide the devices")
    if not len(load) <= devices * slots <= len(load) * devices:
        raise ValueError(
            f"{slots} slots on each of {devices} devices for {len(load)} experts; expected from "
            f"{-(-len(load) // devices)} slots (every expert once) to {len(load)} (every expert everywhere)"
        )
    copies = _copies(load, devices * slots, devices)
    kinds = np.repeat(np.arange(len(load)), copies)
    weights, per_node = (load / copies)[kinds], devices // nodes
    # Dealt rather than packed by weight: copies of an expert follow each other, and so come to different devices.
    node_of, device = deal(weights, nodes), np.empty(len(kinds), np.int64)
    for node in range(nodes):
        own = np.flatnonzero(node_of == node)
        device[own] = node * per_node + swap(weights[own], deal(weights[own], per_node), per_node, kinds[own])
    experts = np.stack([kinds[device == g] for g in range(devices)])
    assert np.array_equal(bin_weights(np.ones(len(kinds)), device, devices), np.full(devices, slots))
    return ReplicaPlan(experts, copies)


def _copies(load: np.ndarray, slots: int, most: int) -> np.ndarray:
    """[E]: one each, and one more to whoever's copies have most to do, until all slots are taken; at most one a device."""
    copies = np.ones(len(load), np.int64)
    for _ in range(slots - len(load)):
        copies[np.argmax(np.where(copies < most, load / copies, -1.0))] += 1
    return copies
