"""Which device holds which expert, planned from measured load. L layers, E experts, G devices, N nodes of G / N devices.

Every device holds E / G experts, at places in sequence, and every node G / N devices in sequence. Nodes are balanced first, as what
crosses between them is dear, then the devices within each. Greedy packing and pairwise exchanges: the best plan is out of reach
(it contains number partitioning), and a plan is only as good as the forecast that the load of the last steps is of the next.
"""

from __future__ import annotations

import numpy as np

from ernie_jax.moe.packing import bin_weights, pack, swap

# A plan made afresh moves nearly every expert; it must be better than an exchange of a few by this share of the fullest device.
_AFRESH = 0.01


def device_loads(load: np.ndarray, places: np.ndarray, devices: int) -> np.ndarray:
    """[L, G] load of each device, from the load and the place [L, E] of each expert."""
    each = load.shape[-1] // devices
    return np.stack([bin_weights(row, place // each, devices) for row, place in zip(load, places, strict=True)])


def plan_layers(load: np.ndarray, places: np.ndarray, *, devices: int, nodes: int = 1, threshold: float = 0.0) -> np.ndarray:
    """`plan_layer` of each layer: load [L, E], places [L, E] -> places [L, E]."""
    options = {"devices": devices, "nodes": nodes}
    return np.stack([plan_layer(row, place, threshold=threshold, **options) for row, place in zip(load, places, strict=True)])


def plan_layer(load: np.ndarray, places: np.ndarray, *, devices: int, nodes: int = 1, threshold: float = 0.0) -> np.ndarray:
    """New places of one layer's experts, under which the fullest device has less to do.

    Args:
      load: [E], tokens (or any measure of work) of each expert.
      places: [E], where each stands now: a permutation.
      devices: G, which divides E.
      nodes: N, which divides G.
      threshold: the share by which the load of the fullest device must fall for anything to move.

    Returns:
      [E] places. Neither the fullest device nor the fullest node has more than now; where nothing is gained, `places` itself.
      An expert that stays on its device stays at its place.

    Raises:
      ValueError: sizes that do not divide, places that are no permutation.
    """
    load, places = np.asarray(load, np.float64), np.asarray(places)
    check_sizes(len(load), devices, nodes)
    if not np.array_equal(np.sort(places), np.arange(len(load))):
        raise ValueError(f"places {places.tolist()} are not a permutation of 0 .. {len(load) - 1}")
    per_node, now = devices // nodes, places // (len(load) // devices)

    def fullest(device: np.ndarray) -> tuple[float, float]:
        return bin_weights(load, device, devices).max(), bin_weights(load, device // per_node, nodes).max()

    few = _within_nodes(load, _between_nodes(load, now, per_node, nodes), per_node, nodes)
    afresh = _afresh(load, per_node, nodes)
    best = afresh if fullest(afresh)[0] < fullest(few)[0] * (1 - _AFRESH) else few
    (device, node), (device_now, node_now) = fullest(best), fullest(now)
    if not device < device_now * (1 - threshold) or node > node_now:
        return places
    return _seated(places, now, best)


def check_sizes(num_experts: int, devices: int, nodes: int) -> None:
    """Refuse experts, devices and nodes that do not divide.

    Raises:
      ValueError: with the numbers.
    """
    if devices < 1 or nodes < 1 or num_experts % devices or devices % nodes:
        raise ValueError(
            f"cannot place {num_experts} experts on {devices} devices of {nodes} nodes; "
            "the devices must divide the experts, and the nodes the devices"
        )


def _between_nodes(load: np.ndarray, device: np.ndarray, per_node: int, nodes: int) -> np.ndarray:
    """Exchanges between nodes; who comes into a node takes the device of one who left."""
    old = device // per_node
    new, result = swap(load, old, nodes), device.copy()
    for node in range(nodes):
        left, came = np.flatnonzero((old == node) & (new != node)), np.flatnonzero((old != node) & (new == node))
        result[came] = device[left]
    return result


def _within_nodes(load: np.ndarray, device: np.ndarray, per_node: int, nodes: int) -> np.ndarray:
    """Exchanges between the devices of each node."""
    result = device.copy()
    for node in range(nodes):
        own = np.flatnonzero(device // per_node == node)
        result[own] = node * per_node + swap(load[own], device[own] % per_node, per_node)
    return result


def _afresh(load: np.ndarray, per_node: int, nodes: int) -> np.ndarray:
    """The device of each expert, whatever it is now."""
    node_of, device = swap(load, pack(load, nodes), nodes), np.empty(len(load), np.int64)
    for node in range(nodes):
        own = np.flatnonzero(node_of == node)
        device[own] = node * per_node + swap(load[own], pack(load[own], per_node), per_node)
    return device


def _seated(places: np.ndarray, now: np.ndarray, device: np.ndarray) -> np.ndarray:
    """Places on the new devices: who stays keeps the place, who comes takes a free one."""
    new = np.where(device == now, places, -1)
    for one in np.unique(device[new < 0]):
        left, came = np.flatnonzero((now == one) & (device != one)), np.flatnonzero((now != one) & (device == one))
        new[came] = np.sort(places[left])
    return new
