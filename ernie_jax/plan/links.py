"""How long a collective takes on a topology: which devices take part, and what they send over which link.

n members of a group, k nodes it spans, m members in each node, B bytes a device, W bytes/s and a seconds a message of a link.

Sources of the formulas
- Ring all-gather and reduce-scatter, (n-1)/n B/W + (n-1) a, and pairwise all-to-all, the same with B/n to each of n-1 peers:
  R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19(1), 2005.
- All-reduce as both of them, 2(n-1)/n B/W, the least any algorithm sends: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce
  algorithms for clusters of workstations", JPDC 69(2), 2009.
- Over several nodes in levels, every member sending its m-th part between nodes: M. Cho et al., "BlueConnect: decomposing
  all-reduce for deep learning on heterogeneous network hierarchy", MLSys 2019.
- All-to-all on a torus, s/4 B/W for rings of s: half of all bytes cross the middle of a ring of which two links carry each way.
  J. Austin et al., "How to Scale Your Model", part 3, 2025.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ernie_jax.config.nearest import did_you_mean
from ernie_jax.plan.topology import Link, Topology
from ernie_jax.sharding.mesh import MESH_AXES


@dataclass(frozen=True)
class Group:
    """The devices that take part in a collective together; of several groups, what the worst placed device of all meets.

    Attributes:
      size: members.
      nodes: that it spans.
      per_node: members in a node, the fewest where the nodes hold unequal numbers.
    """

    size: int
    nodes: int
    per_node: int

    @property
    def even(self) -> bool:
        """Whether every node holds the same number of members, so that the exchange can go in levels."""
        return self.nodes * self.per_node == self.size


def placement(topology: Topology, mesh_shape: Mapping[str, int]) -> np.ndarray:
    """The node of each device, int `[pipeline, data, expert, tensor]`; axes that `mesh_shape` leaves out have size 1.

    Devices are numbered with `tensor` fastest, as `sharding.mesh` lays them out, and nodes are runs of `devices_per_node`.

    Raises:
      ValueError: an unknown axis, a size that is no positive whole number, or a product other than the device count.
    """
    return _nodes(topology.devices_per_node, _sizes(topology, mesh_shape))


def group_along(topology: Topology, mesh_shape: Mapping[str, int], axes: tuple[str, ...]) -> Group:
    """The group of the devices that differ only in their place along `axes`.

    Raises:
      ValueError: as `placement`, or an unknown or repeated axis in `axes`.
    """
    sizes = _sizes(topology, mesh_shape)
    for axis in axes:
        _check_axis(axis)
    if len(set(axes)) != len(axes):
        raise ValueError(f"axes {axes} of a collective repeat one; name each axis once")
    return _group(topology.devices_per_node, sizes, tuple(axis for axis in MESH_AXES if axis in axes))


def collective_seconds(topology: Topology, mesh_shape: Mapping[str, int], kind: str, axes: tuple[str, ...], bytes: float) -> float:
    """Seconds of one collective over `axes`, nothing else using the links.

    Args:
      topology: the machine.
      mesh_shape: sizes by mesh axis; their product is the number of devices.
      kind: one of `COLLECTIVES`, as HLO names them.
      axes: mesh axes that the group runs along.
      bytes: of the result on one device, its own part included; of a reduce-scatter those of the operand.

    Raises:
      ValueError: an unknown kind or axis, negative bytes, or a mesh that does not fit the topology.
    """
    if kind not in COLLECTIVES:
        raise ValueError(f"collective {kind!r} is not known{did_you_mean(kind, COLLECTIVES)}; there are {', '.join(COLLECTIVES)}")
    if not bytes >= 0:
        raise ValueError(f"bytes={bytes!r} of the {kind}; expected a number of at least 0")
    group = group_along(topology, mesh_shape, axes)
    return 0.0 if group.size == 1 else COLLECTIVES[kind](topology, group, bytes)


def _ring(link: Link, members: int, size: float) -> float:
    """An all-gather with a result of `size` bytes, or a reduce-scatter of an operand of as many."""
    return (members - 1) * (size / members / link.achieved + link.latency)


def _scatter_or_gather(topology: Topology, group: Group, size: float) -> float:
    if group.nodes == 1:
        return _ring(topology.intra, group.size, size)
    if not group.even:
        # No levels to go in: one ring, as slow as its slowest link.
        return _ring(topology.inter, group.size, size)
    within = _ring(topology.intra, group.per_node, size)
    return within + _ring(topology.inter, group.nodes, size / group.per_node)


def _all_reduce(topology: Topology, group: Group, size: float) -> float:
    return 2 * _scatter_or_gather(topology, group, size)


def _all_to_all(topology: Topology, group: Group, size: float) -> float:
    near, far = group.per_node - 1, group.size - group.per_node
    each = size / group.size
    within = near * (each / topology.intra.achieved + topology.intra.latency)
    if topology.torus:
        # Messages to distant members pass through the devices between.
        ring = min(group.per_node, _torus_side(topology))
        within = max(within, ring / 4 * each * group.per_node / topology.intra.achieved + near * topology.intra.latency)
    return max(within, far * (each / topology.inter.achieved + topology.inter.latency))


def _permute(topology: Topology, group: Group, size: float) -> float:
    """A shift by one along the group: where it spans nodes, some device sends to another one."""
    link = topology.intra if group.nodes == 1 else topology.inter
    return size / link.achieved + link.latency


COLLECTIVES: dict[str, Callable[[Topology, Group, float], float]] = {
    "all-gather": _scatter_or_gather,
    "all-reduce": _all_reduce,
    "all-to-all": _all_to_all,
    "collective-permute": _permute,
    "ragged-all-to-all": _all_to_all,
    "reduce-scatter": _scatter_or_gather,
}


def _torus_side(topology: Topology) -> float:
    """Members of a ring of the torus, for a slice of equal sides."""
    return min(topology.devices, topology.devices_per_node) ** (1 / topology.torus)


def _check_axis(axis: str) -> None:
    if axis not in MESH_AXES:
        raise ValueError(f"mesh axis {axis!r} is not known{did_you_mean(axis, MESH_AXES)}; there are {', '.join(MESH_AXES)}")


def _sizes(topology: Topology, mesh_shape: Mapping[str, int]) -> tuple[int, ...]:
    """Sizes in the order of `MESH_AXES`."""
    for axis, size in mesh_shape.items():
        _check_axis(axis)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"mesh axis {axis}={size!r}; expected a positive whole number")
    sizes = tuple(mesh_shape.get(axis, 1) for axis in MESH_AXES)
    if math.prod(sizes) != topology.devices:
        shown = ", ".join(f"{axis}={size}" for axis, size in zip(MESH_AXES, sizes, strict=True))
        raise ValueError(
            f"mesh ({shown}) needs {math.prod(sizes)} devices, but {topology.name} has {topology.devices}; change a size, or take "
            "`topology.with_devices`"
        )
    return sizes


# A search asks for the same groups over and over.
@functools.lru_cache(maxsize=4096)
def _group(devices_per_node: int, sizes: tuple[int, ...], axes: tuple[str, ...]) -> Group:
    nodes = _nodes(devices_per_node, sizes)
    order = [MESH_AXES.index(axis) for axis in axes]
    size = math.prod(sizes[i] for i in order)
    members = np.moveaxis(nodes, order, range(-len(order), 0)).reshape(-1, size)
    counts = [np.unique(row, return_counts=True)[1] for row in np.unique(members - members[:, :1], axis=0)]
    return Group(size, max(len(c) for c in counts), min(int(c.min()) for c in counts))


def _nodes(devices_per_node: int, sizes: tuple[int, ...]) -> np.ndarray:
    return (np.arange(math.prod(sizes)) // devices_per_node).reshape(sizes)
