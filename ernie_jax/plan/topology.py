"""A machine to plan for: what its devices compute, hold and send, and where every figure comes from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from ernie_jax.config.nearest import did_you_mean

GIB = 2**30
PLATFORMS = ("gpu", "tpu", "cpu")
DTYPES = ("float32", "bfloat16", "fp8")


@dataclass(frozen=True, kw_only=True)
class Link:
    """What one device can send, one way, over a level of the network.

    Attributes:
      bandwidth: bytes/s by the data sheet.
      latency: seconds a message.
      efficiency: share of `bandwidth` that large messages reach.
    """

    bandwidth: float
    latency: float
    efficiency: float = 1.0

    def __post_init__(self) -> None:
        _number("link", "bandwidth", self.bandwidth, positive=True)
        _number("link", "latency", self.latency)
        _share("link", "efficiency", self.efficiency)

    @property
    def achieved(self) -> float:
        """bytes/s that large messages reach."""
        return self.bandwidth * self.efficiency


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Devices in nodes: runs of `devices_per_node` consecutive devices joined by `intra`, the runs joined by `inter`.

    Attributes:
      name: as `topology_named` reads it, "h100:512".
      platform: "gpu", "tpu" or "cpu".
      device: its kind in words.
      devices: in all; a whole number of nodes, or fewer than one.
      devices_per_node: devices that reach each other over `intra`.
      memory_bytes: of a device.
      flops: dense peak FLOP/s of a device by dtype, "float32" (as the default precision computes it), "bfloat16" and, where the
        device is used with it, "fp8".
      memory_bandwidth: bytes/s of a device.
      intra: within a node.
      inter: between nodes, the share of one device.
      matmul_efficiency: share of the peak that large products reach.
      sources: where each figure is from, by the names in `constants`.
      torus: dimensions of the torus that a node is, 0 where a switch joins its devices. `intra` is then what a device sends along
        one dimension, both ways round the ring.

    Raises:
      ValueError: a value outside its range, or a source of something that is no constant.
    """

    name: str
    platform: str
    device: str
    devices: int
    devices_per_node: int
    memory_bytes: int
    flops: Mapping[str, float]
    memory_bandwidth: float
    intra: Link
    inter: Link
    matmul_efficiency: float
    sources: Mapping[str, str]
    torus: int = 0

    def __post_init__(self) -> None:
        owner = "topology"
        if self.platform not in PLATFORMS:
            known = f"expected one of {', '.join(PLATFORMS)}{did_you_mean(str(self.platform), PLATFORMS)}"
            raise ValueError(f"{owner}.platform={self.platform!r}; {known}")
        for field in ("devices", "devices_per_node", "memory_bytes"):
            _whole(owner, field, getattr(self, field), 1)
        _whole(owner, "torus", self.torus, 0)
        _number(owner, "memory_bandwidth", self.memory_bandwidth, positive=True)
        _share(owner, "matmul_efficiency", self.matmul_efficiency)
        self._check_flops()
        if self.devices > self.devices_per_node and self.devices % self.devices_per_node:
            below = self.devices // self.devices_per_node * self.devices_per_node
            raise ValueError(
                f"{owner}.devices={self.devices} of {self.name} is no whole number of nodes of {self.devices_per_node}; take "
                f"{below} or {below + self.devices_per_node}, or at most {self.devices_per_node} for a part of one node"
            )
        for key in self.sources:
            if key not in self.constants:
                raise ValueError(
                    f"{owner}.sources has {key!r}{did_you_mean(str(key), self.constants)}; there are {', '.join(self.constants)}"
                )
        # Copies, so that no caller's dictionary changes a frozen topology.
        object.__setattr__(self, "flops", dict(self.flops))
        object.__setattr__(self, "sources", dict(self.sources))

    def _check_flops(self) -> None:
        for dtype, value in self.flops.items():
            if dtype not in DTYPES:
                raise ValueError(f"topology.flops has {dtype!r}{did_you_mean(str(dtype), DTYPES)}; there are {', '.join(DTYPES)}")
            _number("topology", f"flops.{dtype}", value, positive=True)
        for dtype in ("float32", "bfloat16"):
            if dtype not in self.flops:
                raise ValueError(f"topology.flops lacks {dtype!r}; give the dense peak of a device in FLOP/s")

    @property
    def nodes(self) -> int:
        """Nodes that the devices fill or begin."""
        return math.ceil(self.devices / self.devices_per_node)

    @property
    def constants(self) -> tuple[str, ...]:
        """Names of the figures that want a source: `memory_bytes`, `flops.bfloat16`, `intra.latency` and so on."""
        links = (f"{level}.{field.name}" for level in ("intra", "inter") for field in dataclasses.fields(Link))
        plain = ("devices_per_node", "memory_bytes", "memory_bandwidth", "matmul_efficiency", "torus")
        return (*plain, *(f"flops.{dtype}" for dtype in self.flops), *links)

    @property
    def unsourced(self) -> tuple[str, ...]:
        """The constants nobody gave a source of; empty for those of the catalogue and for files."""
        return tuple(name for name in self.constants if not self.sources.get(name))

    def peak(self, dtype: str) -> float:
        """Dense peak FLOP/s of a device.

        Raises:
          ValueError: a dtype that this topology has no figure for.
        """
        if dtype not in self.flops:
            known = ", ".join(self.flops)
            raise ValueError(f"{self.name} has no peak for dtype {dtype!r}{did_you_mean(dtype, self.flops)}; it has {known}")
        return self.flops[dtype]

    def with_devices(self, devices: int) -> Topology:
        """The same nodes with another number of devices, checked and named again.

        For fake CPU devices, which share one machine, take `measure_cpu` instead: here each keeps the share it had.
        """
        return dataclasses.replace(self, name=f"{self.name.partition(':')[0]}:{devices}", devices=devices)


def _whole(owner: str, field: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{owner}.{field}={value!r}; expected a whole number of at least {least}")


def _number(owner: str, field: str, value: object, *, positive: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (positive and value == 0):  # type: ignore[operator]
        raise ValueError(f"{owner}.{field}={value!r}; expected a {'positive' if positive else 'non-negative'} number")


def _share(owner: str, field: str, value: object) -> None:
    _number(owner, field, value, positive=True)
    if value > 1:  # type: ignore[operator]
        raise ValueError(f"{owner}.{field}={value!r}; expected a share above 0 and at most 1 (0.7 for 70%)")
