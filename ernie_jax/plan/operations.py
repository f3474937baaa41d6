"""What a device computes in a step, operation by operation: FLOPs of products and bytes that pass through its memory.

n tokens of a microbatch and device, D model, I dense width, F expert width, E experts, K chosen, R rows of a device's experts,
t tensor shards, w bytes of an activation, T tokens a row, P patches of a device.

An operation takes the longer of its arithmetic and its traffic: S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful
visual performance model for multicore architectures", CACM 52(4), 2009. Traffic counts each operand and result once, weights as
they are stored in float32, with a copy in the compute format where that is another one. A backward pass multiplies twice what the
forward pass did. Spare rows of the experts' buffers multiply nothing, but are filled, activated and added: they count as traffic.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ernie_jax.config.compute import ComputeConfig
from ernie_jax.config.run import RunConfig
from ernie_jax.config.segments import segments_of
from ernie_jax.nn.attention_kernels import choose_implementation
from ernie_jax.plan.topology import Topology
from ernie_jax.train.flops import patch_parameters
from ernie_jax.train.remat_prediction import StepShape
from ernie_jax.train.stages import pipelined_segment

# Assumed: with the router's bias settled the fullest device of an expert group has 1 / 0.92 of the mean load.
EXPERT_SKEW = 1 / 0.92
# AdamW as `train.optimizer` computes it, float32: each moment is read, with the gradient, and written; the parameter is read with
# both moments and written; the norm reads the gradient once more. 11 numbers a parameter.
UPDATE_BYTES = 44
_FLOAT = 4
# On CPU the buffers of the experts are passed over about so often as often as the operations need: fills, masks and transposes are
# loops of their own. Fitted, with the two below, to processor time of meshes of the quick start (`bench.py plan`).
CPU_BUFFER_PASSES = 2.5
# What a collective costs on fake devices beyond its copies, and (assumed) the start of a layer's pass: as FLOPs of a product on one
# of eight devices, since both slow down as the cores do. Eight threads meet in each collective, on cores that all share.
CPU_MEETING_FLOPS = 1.7e7
CPU_LAYER_FLOPS = 1e7
# What the passes of a pipeline took on CPU beyond their operations, as a share of these, where its chunks have unequal numbers of
# layers, which then run under branches. Fitted to five meshes of two stages with three layers; those of equal chunks in
# docs/performance.md took nothing more.
CPU_UNEVEN_STAGES = 0.5


def cpu_seconds(topology: Topology, flops: float) -> float:
    """Seconds of an overhead that is stated in FLOPs; 0 but for fake CPU devices."""
    return flops / topology.peak("float32") if topology.platform == "cpu" else 0.0


@dataclass(frozen=True)
class Operation:
    """Work of one device.

    Attributes:
      part: what it belongs to: "attention", "dense MLPs", "experts", "router", "head", "vision".
      flops: of products.
      bytes: read and written.
      dtype: whose peak the products have.
      weights: numbers of weights in its products, each of which has a gradient.
    """

    part: str
    flops: float
    bytes: float
    dtype: str
    weights: float = 0.0

    def seconds(self, topology: Topology) -> float:
        """On a device of the topology."""
        return roofline(topology, self.flops, self.bytes, self.dtype)

    @property
    def backward(self) -> Operation:
        """Its backward pass: two products for each, and a gradient of each weight."""
        return Operation(self.part, 2 * self.flops, 2 * self.bytes + _FLOAT * self.weights, self.dtype)


def roofline(topology: Topology, flops: float, bytes: float, dtype: str) -> float:
    """Seconds of an operation on a device: the longer of arithmetic at the share of the peak that products reach, and traffic."""
    return max(flops / (topology.peak(dtype) * topology.matmul_efficiency), bytes / topology.memory_bandwidth)


@dataclass(frozen=True)
class StepWork:
    """A device's work in one microbatch of a run; layers by their kind.

    Attributes:
      run: the run.
      shape: its sizes on a device.
      platform: "gpu", "tpu" or "cpu".
      skew: load of the fullest device of an expert group over the mean.
    """

    run: RunConfig
    shape: StepShape
    platform: str
    skew: float = EXPERT_SKEW

    @functools.cached_property
    def compute(self) -> ComputeConfig:
        """How the run computes."""
        return self.run.compute

    @property
    def dtype(self) -> str:
        """Format of all products but the experts'."""
        return self.compute.dtype

    @property
    def vision_share(self) -> float:
        """Share of the tokens that stand for images: patches of all devices of a batch shard over m^2, m the merged side."""
        vision = self.run.model.vision
        if vision is None:
            return 0.0
        behind = self.run.mesh.pipeline * self.run.mesh.tensor
        return min(1.0, self.shape.patches * behind / vision.spatial_merge_size**2 / self.shape.tokens)

    def layer(self, kind: str) -> list[Operation]:
        """Forward of a "dense" or "moe" layer."""
        return [*self._attention(), *(self._dense_mlp(self.run.model.intermediate_size) if kind == "dense" else self._moe())]

    def unit(self, kinds: Sequence[str]) -> list[Operation]:
        """Forward of several layers."""
        return [op for kind in kinds for op in self.layer(kind)]

    def _product(self, part: str, rows: float, inner: float, outer: float, shards: int = 1, dtype: str | None = None) -> Operation:
        """[rows, inner] x [inner, outer / shards] or [inner / shards, outer]: one side is whole on each device."""
        weights, acts = inner * outer / shards, rows * (inner + outer / shards)
        chosen = dtype or self.dtype
        size = self.shape.width if chosen != "float32" else _FLOAT
        return Operation(part, 2 * rows * weights, weights * self._weight_bytes + acts * size, chosen, weights)

    @property
    def _weight_bytes(self) -> int:
        """Of a weight when it is used: read in float32, and where products are narrower written and read once more."""
        return _FLOAT if self.shape.width == _FLOAT else _FLOAT + 2 * self.shape.width

    def _attention(self) -> list[Operation]:
        model, s = self.run.model, self.shape
        n, t, d, dim = s.tokens, s.tensor, model.head_dim, model.hidden_size
        heads, kv = model.num_attention_heads, max(model.num_key_value_heads, t)
        part = "attention"
        met, passed = self._scores(self.run.seq_len)
        operands = n * d * (2 * heads + 2 * kv) / t * s.width
        # The norm, the rotation and the residual: each number is read and written about five times, over `tensor` split.
        plain = 10 * n * dim / t * s.width
        return [
            self._product(part, n, dim, d * (heads + 2 * kv), t),
            Operation(part, 4 * n * met * heads * d / t, operands + n * passed * heads / t, self.dtype),
            self._product(part, n, heads * d, dim, t),
            Operation(part, 0, plain, self.dtype),
        ]

    def _scores(self, length: int) -> tuple[float, float]:
        """(scores that the kernel computes for a query among `length`, bytes of them that pass through memory for each head)."""
        chosen = choose_implementation(
            self.compute.attention,
            query_length=length,
            backend=self.platform,
            chunk_from=self.compute.attention_chunk_from,
            dtype=self.dtype,
        )
        if chosen == "chunked":
            # By tiles, without those behind a causal row. In a tower the tiles of an image's own frame are about as many.
            tile = min(self.compute.attention_chunk, length)
            return tile * (math.ceil(length / tile) + 1) / 2, 0.0
        # Written and read: scores and probabilities in float32; of cuDNN the mask alone, which it takes as a bias of 16 bits.
        return length, length * (4 * _FLOAT if chosen == "dense" else 2)

    def _dense_mlp(self, width: int, part: str = "dense MLPs") -> list[Operation]:
        n, t, dim, w = self.shape.tokens, self.shape.tensor, self.run.model.hidden_size, self.shape.width
        return [
            self._product(part, n, dim, 2 * width, t),
            Operation(part, 0, (3 * n * width / t + 6 * n * dim / t) * w, self.dtype),
            self._product(part, n, width, dim, t),
        ]

    def _moe(self) -> list[Operation]:
        moe, s = self.run.model.moe, self.shape
        assert moe is not None
        dim, gates = self.run.model.hidden_size, 1 if moe.vision_intermediate_size is None else 2
        found = [self._product("router", s.tokens / s.tensor, dim, gates * moe.num_experts, 1, "float32")]
        if moe.num_shared_experts:
            found += self._dense_mlp(moe.shared_intermediate_size)
        vision = self.vision_share
        found += self._experts(moe.intermediate_size, 1 - vision)
        if moe.vision_intermediate_size is not None:
            found += self._experts(moe.vision_intermediate_size, vision)
        # Rows are written to the buckets, gathered by expert, and the same on their way back.
        filled = 2 * (s.sent + s.rows) * self._buffer_passes + 2 * self._real_rows
        return [*found, Operation("experts", 0, filled * dim * s.width, self.dtype)]

    @property
    def _buffer_passes(self) -> float:
        return CPU_BUFFER_PASSES if self.platform == "cpu" else 1.0

    @property
    def _real_rows(self) -> float:
        moe = self.run.model.moe
        assert moe is not None
        skew = self.skew if self.run.mesh.expert > 1 else 1.0
        return min(self.shape.rows, self.shape.tokens * moe.num_experts_per_tok * skew)

    def _experts(self, width: int, share: float) -> list[Operation]:
        moe, s = self.run.model.moe, self.shape
        assert moe is not None
        dim, t = self.run.model.hidden_size, s.tensor
        own, rows = moe.num_experts / self.run.mesh.expert, self._real_rows * share
        dtype = "fp8" if self.compute.fp8 is not None else self.dtype
        found = []
        for inner, outer in ((dim, 2 * width / t), (width / t, dim)):
            weights = own * inner * outer
            acts = (rows * inner + s.rows * outer * self._buffer_passes) * s.width
            found.append(Operation("experts", 2 * rows * inner * outer, weights * self._weight_bytes + acts, dtype, weights))
        return [*found, Operation("experts", 0, 3 * s.rows * width / t * self._buffer_passes * s.width, self.dtype)]

    def head(self) -> list[Operation]:
        """Embedding, final norm, logits and loss with their gradients, and the blocks of multi-token prediction, which make
        logits once more each; forward and backward together, since the loss computes its gradients at once."""
        model, s = self.run.model, self.shape
        n, t, dim, vocab = s.tokens, s.tensor, model.hidden_size, model.vocab_size
        product = self._product("head", n, dim, vocab, t)
        # Logits of a chunk of tokens are written and read in float32, a few times.
        logits = Operation("head", 3 * product.flops, product.bytes + 4 * n * vocab / t * _FLOAT, self.dtype)
        # A gradient of the whole table, and of the head's.
        tables = Operation("head", 0, 3 * vocab * dim / t * _FLOAT + 6 * n * dim * s.width, self.dtype)
        found = [logits, tables]
        for _ in range(self.run.mtp_blocks):
            block = [self._product("head", n, 2 * dim, dim), *self.layer("dense")]
            found += [logits, *block, *(op.backward for op in block)]
        return found

    def tower(self) -> list[Operation]:
        """Forward of the vision tower and the resampler over a device's patches; none of a text model."""
        model, patches = self.run.model, self.shape.patches
        vision = model.vision
        if vision is None or not patches:
            return []
        dim, w = vision.hidden_size, self.shape.width
        weights = patch_parameters(model)
        met, passed = self._scores(patches)
        acts = vision.depth * patches * (12 * dim + 2 * vision.intermediate_size) * w
        scores = vision.depth * patches * passed * vision.num_heads
        traffic = weights * self._weight_bytes + acts + scores
        flops = 2 * patches * weights + vision.depth * 4 * patches * met * dim
        return [Operation("vision", flops, traffic, self.dtype, weights)]

    @property
    def forward_flops(self) -> float:
        """Of all layers and the tower in one microbatch, balanced, as `train.remat_prediction.extra_flops` counts its own."""
        balanced = StepWork(self.run, self.shape, self.platform, skew=1.0)
        layers = sum(op.flops * s.repeats for s in segments_of(self.run.model) for op in balanced.unit(s.unit))
        return layers + sum(op.flops for op in self.tower())


@dataclass(frozen=True)
class ShardSizes:
    """Numbers of weights on one device.

    Attributes:
      kept: of parameters between steps.
      moments: of each moment, and of gradients once they are summed.
    """

    kept: float
    moments: float

    @classmethod
    def of(cls, run: RunConfig) -> ShardSizes:
        """By the rules of `sharding.rules`: matrices over `tensor` and `pipeline`, experts over `expert` too, and with ZeRO over
        the data axes; of the vision tower whole copies, but for ZeRO."""
        mesh, groups = run.mesh, weight_groups(run)
        batch = mesh.data * mesh.expert

        def held(zero: bool) -> float:
            # Stages keep all of a matrix where they and ZeRO do not divide its width (see `sharding.make_layout`).
            parted = run.model.hidden_size % (mesh.pipeline * (batch if zero else 1)) == 0
            split = mesh.tensor * (mesh.pipeline if parted else 1)
            dense = groups["dense"] / split / (batch if zero else 1)
            experts = groups["experts"] / split / mesh.expert / (mesh.data if zero else 1)
            return dense + experts + groups["vision"] / (batch if zero else 1)

        return cls(held(mesh.zero == 3), held(mesh.zero in (1, 3)))


def weight_groups(run: RunConfig) -> dict[str, float]:
    """Numbers of weights that are sharded alike: "dense" (attention, MLPs, tables), "experts", "vision"."""
    model, moe = run.model, run.model.moe
    d, width = model.hidden_size, model.head_dim
    attention = 2 * d * width * (model.num_attention_heads + model.num_key_value_heads)
    dense = model.num_hidden_layers * attention + model.layer_kinds.count("dense") * 3 * d * model.intermediate_size
    dense += model.vocab_size * d * (1 if model.tie_word_embeddings else 2)
    dense += run.mtp_blocks * (2 * d * d + attention + 3 * d * model.intermediate_size)
    experts = 0
    if moe is not None:
        gates = 1 if moe.vision_intermediate_size is None else 2
        dense += model.num_moe_layers * (gates * d * moe.num_experts + 3 * d * moe.shared_intermediate_size)
        widths = moe.intermediate_size + (moe.vision_intermediate_size or 0)
        experts = model.num_moe_layers * moe.num_experts * 3 * d * widths
    vision = 0.0
    if model.vision is not None:
        v, merged = model.vision, model.vision.hidden_size * model.vision.spatial_merge_size**2
        tower = v.in_channels * v.patch_size**2 * v.hidden_size
        tower += v.depth * (4 * v.hidden_size**2 + 2 * v.hidden_size * v.intermediate_size)
        vision = tower + 5 * merged**2 + merged * d
    return {"dense": float(dense), "experts": float(experts), "vision": float(vision)}


def stage_loops(run: RunConfig, platform: str) -> float:
    """Share by which the passes of a pipeline take longer than their operations; see `CPU_UNEVEN_STAGES`."""
    chunks = run.mesh.pipeline * run.pipeline.virtual_stages
    repeats = segments_of(run.model)[pipelined_segment(run.model)].repeats
    return CPU_UNEVEN_STAGES if platform == "cpu" and repeats % chunks else 0.0
