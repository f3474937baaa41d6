"""The catalogue of topologies: GPU nodes, TPU slices, and fake CPU devices.

Figures are those of data sheets; the share of a link or of the peak that is reached is stated apart, with its own source. What
nobody publishes says `assumed`. GB are decimal: an "80 GB" card reports up to 7% more, which its driver and libraries need.

A node of a TPU is its whole slice, not a host: chips of a slice reach each other over the same links (ICI) whichever host they hang
on, and only the data-centre network between slices (DCN) is slower. So `v5e:512` are two slices, and `v5p:512` a part of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ernie_jax.config.nearest import did_you_mean
from ernie_jax.plan.cpu_topology import measure_cpu
from ernie_jax.plan.topology import Link, Topology
from ernie_jax.plan.topology_file import load_topology
from ernie_jax.train.flops import PEAK_FLOPS

__all__ = ["TOPOLOGIES", "load_topology", "machine_named", "measure_cpu", "topology_named"]

_DEEPSEEK = "Zhao et al., Insights into DeepSeek-V3 (arXiv 2505.09343), section 4.3"
_NCCL = "NCCL src/graph/tuning.cc, hwLat of a ring step, LL128"
_BOOK = "Austin et al., How to Scale Your Model (jax-ml.github.io/scaling-book), part 2"


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """Figures of a catalogue entry, each a pair of value and source."""

    platform: str
    device: str
    kind: str  # key of PEAK_FLOPS
    sheet: str
    node: tuple[int, str]
    memory: tuple[int, str]
    float32: tuple[float, str]
    fp8: tuple[float, str]
    memory_bandwidth: tuple[float, str]
    matmul_efficiency: tuple[float, str]
    intra: tuple[tuple[float, str], tuple[float, str], tuple[float, str]]  # bandwidth, latency, efficiency
    inter: tuple[tuple[float, str], tuple[float, str], tuple[float, str]]
    torus: int = 0

    def topology(self, name: str, devices: int) -> Topology:
        bfloat16 = (PEAK_FLOPS[self.kind], f"{self.sheet}; the table of train.flops")
        figures = {
            "devices_per_node": self.node,
            "memory_bytes": self.memory,
            "memory_bandwidth": self.memory_bandwidth,
            "matmul_efficiency": self.matmul_efficiency,
            "torus": (self.torus, f"{self.sheet}: {self.torus}D torus" if self.torus else "a switch joins the devices of a node"),
            "flops.float32": self.float32,
            "flops.bfloat16": bfloat16,
            "flops.fp8": self.fp8,
        }
        links = {"intra": self.intra, "inter": self.inter}
        for level, link in links.items():
            figures |= {f"{level}.{field}": pair for field, pair in zip(("bandwidth", "latency", "efficiency"), link, strict=True)}
        made = {
            level: Link(bandwidth=bandwidth[0], latency=latency[0], efficiency=efficiency[0])
            for level, (bandwidth, latency, efficiency) in links.items()
        }
        return Topology(
            name=name,
            platform=self.platform,
            device=self.device,
            devices=devices,
            devices_per_node=self.node[0],
            memory_bytes=self.memory[0],
            flops={"float32": self.float32[0], "bfloat16": bfloat16[0], "fp8": self.fp8[0]},
            memory_bandwidth=self.memory_bandwidth[0],
            intra=made["intra"],
            inter=made["inter"],
            matmul_efficiency=self.matmul_efficiency[0],
            sources={field: source for field, (_, source) in figures.items()},
            torus=self.torus,
        )


def _gpu(
    kind: str, form: str, sheet: str, *, memory: int, bandwidth: float, nvlink: float, port: float, efficiency: float,
    float32: float | None = None, fp8: bool = True, nvlink_from: str | None = None,
) -> _Entry:  # fmt: skip
    """Eight NVIDIA GPUs a node behind NVSwitch, one InfiniBand port each. NVLink as data sheets give it, both ways together."""
    peak = PEAK_FLOPS[kind]
    rate = f"one {port * 8 / 1e9:.0f} Gb/s InfiniBand port a GPU, as in the DGX of its generation"
    return _Entry(
        platform="gpu",
        device=f"{kind} {form}",
        kind=kind,
        sheet=sheet,
        node=(8, "DGX and HGX boards of eight"),
        memory=(memory, sheet),
        float32=(float32 or peak / 2, f"{sheet}, TF32: what XLA's default precision takes for float32 products on GPUs"),
        fp8=(2 * peak, sheet) if fp8 else (peak, f"{sheet}: no fp8 tensor cores, products in bf16"),
        memory_bandwidth=(bandwidth, sheet),
        matmul_efficiency=(efficiency, "assumed: large bf16 products below the clock of the data sheet, under the power limit"),
        intra=(
            (nvlink / 2, f"{nvlink_from or sheet}: NVLink {nvlink / 1e9:.0f} GB/s, half of it each way"),
            (1.9e-6, _NCCL),
            (0.8, f"{_DEEPSEEK}: 160 of 200 GB/s on H800; assumed for the others"),
        ),
        inter=(
            (port, rate),
            (4.0e-6, _NCCL),
            (0.8, f"{_DEEPSEEK}: 40 of 50 GB/s of an NDR port; assumed for the others"),
        ),
    )


def _tpu(
    kind: str, page: str, *, slice_of: int, memory: int, bandwidth: float, ici: float, ports: int, dcn: float, dcn_from: str,
) -> _Entry:  # fmt: skip
    """Chips of slices of at most `slice_of`. ICI as the pages give it: of a chip, both ways, over all its ports."""
    peak = PEAK_FLOPS[kind]
    sheet = f"Cloud TPU documentation, {page} page"
    along = f"{sheet}: ICI {ici / 1e9:.0f} GB/s both ways over {ports} ports; two of them, one way"
    return _Entry(
        platform="tpu",
        device=kind,
        kind=kind,
        sheet=sheet,
        node=(slice_of, f"{sheet}: largest slice"),
        memory=(memory, sheet),
        float32=(peak, "as bf16: XLA's default precision rounds operands of float32 products to bf16 on TPUs"),
        fp8=(peak, sheet if page == "v5p" else "assumed: as bf16, the page names no fp8 rate"),
        memory_bandwidth=(bandwidth, sheet),
        matmul_efficiency=(0.85, "assumed: MaxText reports up to 67% (v5e) and 71% (v5p) MFU of whole steps, products do better"),
        intra=(
            (ici / ports, f"{along}; assumed: a mesh axis lies along one dimension of the torus and its ring is closed"),
            (1e-6, f"{_BOOK}: about 1 us a hop"),
            (0.9, f"{_BOOK}: 45 of 50 and 90 of 100 GB/s a link"),
        ),
        inter=(
            (dcn, dcn_from),
            (1e-5, "assumed: a message through two hosts and the data-centre network"),
            (1.0, "assumed: the bandwidth is a share of the hosts' ports already"),
        ),
        torus=ports // 2,
    )


TOPOLOGIES: dict[str, _Entry] = {
    "a100-80": _gpu(
        "NVIDIA A100", "SXM 80 GB", "NVIDIA A100 data sheet, SXM 80 GB",
        memory=80 * 10**9, bandwidth=2.039e12, nvlink=600e9, port=25e9, efficiency=0.8, fp8=False,
    ),
    "h100": _gpu(
        "NVIDIA H100", "SXM", "NVIDIA H100 data sheet, SXM, without sparsity",
        memory=80 * 10**9, bandwidth=3.35e12, nvlink=900e9, port=50e9, efficiency=0.7,
    ),
    "h800": _gpu(
        "NVIDIA H800", "SXM", "NVIDIA H100 data sheet, which H800 shares but for NVLink",
        memory=80 * 10**9, bandwidth=3.35e12, nvlink=400e9, port=50e9, efficiency=0.7, nvlink_from=_DEEPSEEK,
    ),
    "h200": _gpu(
        "NVIDIA H200", "SXM", "NVIDIA H200 data sheet, SXM, without sparsity",
        memory=141 * 10**9, bandwidth=4.8e12, nvlink=900e9, port=50e9, efficiency=0.7,
    ),
    "b200": _gpu(
        "NVIDIA B200", "HGX", "NVIDIA Blackwell data sheet, HGX B200, half of the sparse rates",
        memory=180 * 10**9, bandwidth=7.7e12, nvlink=1800e9, port=50e9, efficiency=0.7, float32=1100e12,
    ),
    "v5e": _tpu(
        "TPU v5e", "v5e", slice_of=256, memory=16 * 10**9, bandwidth=819e9, ici=400e9, ports=4,
        dcn=3.125e9, dcn_from="Cloud TPU documentation, v5e page: 6.4 Tbps of 256 chips",
    ),
    "v5p": _tpu(
        "TPU v5p", "v5p", slice_of=6144, memory=95 * 2**30, bandwidth=2765e9, ici=1200e9, ports=6,
        dcn=6.25e9, dcn_from="Cloud TPU documentation, v5p page: 50 Gbps a chip",
    ),
    "v6e": _tpu(
        "TPU v6e", "v6e", slice_of=256, memory=32 * 10**9, bandwidth=1638e9, ici=800e9, ports=4,
        dcn=12.5e9, dcn_from=f"{_BOOK}: DCN egress a chip",
    ),
}  # fmt: skip


def topology_named(name: str) -> Topology:
    """A topology of the catalogue: "h100:512", or "h100" for one node; "cpu:8" for fake devices of this machine.

    Raises:
      ValueError: an unknown name, with the nearest known one, or a number of devices that does not fill nodes.
    """
    base, colon, count = name.partition(":")
    known = (*TOPOLOGIES, "cpu")
    if base not in known:
        raise ValueError(
            f"topology {name!r} is not known{did_you_mean(base, known)}; there are {', '.join(known)}, each with :DEVICES, and "
            "YAML files of your own"
        )
    if colon and not (count.isascii() and count.isdecimal() and int(count) > 0):
        raise ValueError(f"topology {name!r}: {count!r} is no number of devices; write {base}:8")
    if base == "cpu":
        return measure_cpu(int(count) if colon else 8)
    entry = TOPOLOGIES[base]
    devices = int(count) if colon else entry.node[0]
    return entry.topology(f"{base}:{devices}", devices)


def machine_named(topology: str | Topology) -> Topology:
    """A topology of the catalogue or of a YAML file by its name or path; one that is given stays as it is.

    Raises:
      ValueError: as `load_topology` and `topology_named`.
    """
    if isinstance(topology, Topology):
        return topology
    if topology.endswith((".yaml", ".yml")) or Path(topology).is_file():
        return load_topology(topology)
    return topology_named(topology)
