"""What each remat policy should keep and compute again, from shapes alone: bytes of a device, FLOPs of all devices together.

n tokens of a microbatch and device, D model, hq/hk query/kv heads, d head width, F width, E experts, K chosen, R rows of a device's
experts, G expert shards, t tensor shards, p patches of a device, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ernie_jax.config.model import ModelConfig
from ernie_jax.config.remat import Remat, remat_plan, remat_within
from ernie_jax.config.run import RunConfig
from ernie_jax.config.segments import segments_of
from ernie_jax.models.decoder import kinds_of
from ernie_jax.moe.capacity import device_capacity
from ernie_jax.nn.attention_kernels import choose_implementation
from ernie_jax.sharding import BATCH_AXES, Layout

_INT = _FLOAT = 4


@dataclass(frozen=True)
class StepShape:
    """The sizes of a step on one device that decide what its layers keep.

    Attributes:
      tokens: n, of a microbatch.
      rows: R, of the experts' buffers, spare ones included.
      assignments: that are sorted by expert, R or more.
      sent: rows that the exchange receives, 0 on one expert shard.
      rows_share: rows that are there on average, of one set of experts, as a share of R.
      patches: p; 0 without images.
      tensor, devices: t, and all devices.
      chunked, vision_chunked: whether attention is computed by tiles, and in the tower.
      width: bytes of a number of the activations.
    """

    tokens: int
    rows: int
    assignments: int
    sent: int
    rows_share: float
    patches: int
    tensor: int
    devices: int
    chunked: bool
    vision_chunked: bool
    width: int

    @classmethod
    def of(cls, run: RunConfig, layout: Layout, platform: str | None = None) -> StepShape:
        """Of a run's step on a platform, that of the layout's devices by default (an abstract mesh has none)."""
        backend = platform or layout.mesh.devices.flat[0].platform
        model, moe = run.model, run.model.moe
        tokens = run.batch_size // run.parts * run.seq_len // layout.axis_size(*BATCH_AXES)
        rows = assignments = sent = 0
        share = 1.0
        if moe is not None and model.num_moe_layers:
            sets = 1 if moe.vision_intermediate_size is None else 2
            rows, assignments, sent = _expert_rows(run, layout, tokens, sets)
            share = min(1.0, tokens * moe.num_experts_per_tok / rows / sets)
        patches = (run.data.max_patches or 0) if model.vision is not None else 0

        def tiled(length: int) -> bool:
            c = run.compute
            chosen = choose_implementation(
                c.attention, query_length=length, backend=backend, chunk_from=c.attention_chunk_from, dtype=c.dtype
            )
            return chosen == "chunked"

        width = 2 if run.dtype == "bfloat16" else 4
        tensor = layout.axis_size("tensor")
        kernels = tiled(run.seq_len), tiled(patches)
        return cls(tokens, rows, assignments, sent, share, patches, tensor, layout.mesh.size, *kernels, width)


def _expert_rows(run: RunConfig, layout: Layout, tokens: int, sets: int) -> tuple[int, int, int]:
    """(R, assignments, rows received) of the dispatcher that the run uses."""
    moe, shards = run.model.moe, layout.shards("expert")
    assert moe is not None
    k, own = moe.num_experts_per_tok, moe.num_experts * sets // shards
    if layout.mesh.size == 1:
        return tokens * k, tokens * k, 0
    bucket, bound = tokens, math.inf
    factor = run.moe.capacity_factor
    if factor is not None:
        of_row = device_capacity(run.seq_len, moe.num_experts, k, factor, shards=shards, sets=sets)
        bound = tokens // run.seq_len * shards * of_row
        if run.moe.dispatch in ("auto", "all_to_all"):
            bucket = min(tokens, tokens // run.seq_len * min(run.seq_len, of_row))
    sent, slots = (0, tokens * k) if shards == 1 else (shards * bucket, shards * bucket * min(k, own))
    return int(min(slots, bound)), slots, sent


def tag_bytes(model: ModelConfig, shape: StepShape) -> dict[tuple[str, str], float]:
    """(layer kind, tag) -> bytes on a device in one layer of that kind: `dense`, `moe`, or `vision` for a block of the tower."""
    n, t, w, d = shape.tokens, shape.tensor, shape.width, model.head_dim
    layer = {
        "qkv": n * (model.num_attention_heads + 2 * max(model.num_key_value_heads, t)) * d * w / t,
        "attn_out": n * model.num_attention_heads * d * w / t,
        "attn_log_sum": n * model.num_attention_heads * _FLOAT / t if shape.chunked else 0,
        "residual": n * model.hidden_size * w / t,
    }
    sizes = {("dense", tag): size for tag, size in layer.items()}
    sizes["dense", "mlp_gate_up"] = n * 2 * model.intermediate_size * w / t
    moe = model.moe
    if moe is not None:
        sizes |= {("moe", tag): size for tag, size in layer.items()}
        slots = shape.assignments // shape.sent if shape.sent else 0
        sizes |= {
            ("moe", "mlp_gate_up"): n * 2 * moe.shared_intermediate_size * w / t if moe.num_shared_experts else 0,
            ("moe", "router"): n * moe.num_experts * _FLOAT / t,
            # The order and its inverse, and on several shards whose token each place of the buffer holds.
            ("moe", "expert_sort"): (shape.rows + shape.assignments + shape.sent) * _INT,
            ("moe", "expert_received"): shape.sent * (model.hidden_size * w + 2 * slots * _FLOAT),
            ("moe", "expert_gate_up"): shape.rows * 2 * moe.intermediate_size * w / t,
            ("moe", "vision_expert_gate_up"): shape.rows * 2 * (moe.vision_intermediate_size or 0) * w / t,
        }
    if model.vision is not None:
        v, p = model.vision, shape.patches
        sizes |= {
            ("vision", "vit_qkv"): p * 3 * v.hidden_size * w,
            ("vision", "vit_attn_out"): p * v.hidden_size * w,
            ("vision", "vit_attn_log_sum"): p * v.num_heads * _FLOAT if shape.vision_chunked else 0,
            ("vision", "vit_residual"): p * v.hidden_size * w,
            ("vision", "vit_act"): p * v.intermediate_size * w,
        }
    return sizes


def unit_bytes(model: ModelConfig, shape: StepShape, policy: Remat, unit: Sequence[str]) -> float | None:
    """Bytes on a device that one repetition of a unit of `dense` and `moe` layers keeps for its backward pass: its input, and the
    tensors of the policy's tags. None where the policy leaves the unit alone: what JAX keeps there no table tells."""
    plan = remat_plan(remat_within(policy, kinds_of(unit, model)))
    if plan.everything:
        return None
    sizes = tag_bytes(model, shape)
    total = sizes[unit[0], "residual"]
    for place, kind in enumerate(unit):
        # Between the layers of a unit stands a residual more; the last is the next unit's input.
        times = {"residual": 2 if place + 1 < len(unit) else 1}
        total += sum(times.get(tag, 1) * sizes.get((kind, tag), 0) for tag in plan.saved)
    return total


def block_bytes(model: ModelConfig, shape: StepShape, policy: Remat) -> float | None:
    """Likewise of a block of the vision tower."""
    plan = remat_plan(remat_within(policy, ("vision_block",)))
    if plan.everything:
        return None
    sizes = tag_bytes(model, shape)
    return sizes["vision", "vit_residual"] + sum(sizes.get(("vision", tag), 0) for tag in plan.saved)


def kept_bytes(model: ModelConfig, shape: StepShape, policy: Remat) -> float | None:
    """Of all layers and blocks; None where any of them is left alone."""
    parts = [(s.repeats, unit_bytes(model, shape, policy, s.unit)) for s in segments_of(model)]
    if model.vision is not None:
        parts.append((model.vision.depth, block_bytes(model, shape, policy)))
    known = [count * size for count, size in parts if size is not None]
    return sum(known) if len(known) == len(parts) else None


def extra_flops(run: RunConfig, shape: StepShape, policy: Remat) -> float:
    """FLOPs of products computed a second time under a policy, on all devices, for causal rows and balanced experts.

    The last product of each unit is not among them: only the next unit needs its result, and has it.
    """
    model, total = run.model, 0.0
    for segment in segments_of(model):
        plan = remat_plan(remat_within(policy, kinds_of(segment.unit, model)))
        if not plan.everything:
            kept = (*plan.saved, *plan.offloaded)
            for place, kind in enumerate(segment.unit):
                total += segment.repeats * _layer_flops(run, shape, kind, kept, last=place + 1 == len(segment.unit))
    plan = remat_plan(remat_within(policy, kinds_of(("dense",), model)))
    if run.mtp_blocks and not plan.everything:
        # What the projection gives has no tag: the layer starts from it.
        projection = 4 * model.hidden_size * model.hidden_size
        layer = _layer_flops(run, shape, "dense", (*plan.saved, *plan.offloaded), last=True)
        total += run.mtp_blocks * (projection + layer)
    tokens = shape.tokens * shape.devices / shape.tensor * run.parts
    total *= tokens
    if model.vision is not None:
        plan = remat_plan(remat_within(policy, ("vision_block",)))
        if not plan.everything:
            block = _block_flops(model, shape, (*plan.saved, *plan.offloaded), run.compute.attention_chunk)
            total += model.vision.depth * block * shape.patches * shape.devices * run.parts
    return total


def _layer_flops(run: RunConfig, shape: StepShape, kind: str, kept: tuple[str, ...], *, last: bool) -> float:
    """Of a token in a layer."""
    model, moe = run.model, run.model.moe
    dim, heads, d = model.hidden_size, model.num_attention_heads, model.head_dim
    scores = 2 * heads * d * (_tiles_met(run.seq_len, run.compute.attention_chunk) if shape.chunked else run.seq_len)
    total = 0.0
    if "qkv" not in kept:
        total += 2 * dim * d * (heads + 2 * model.num_key_value_heads)
    if "attn_out" not in kept or (shape.chunked and "attn_log_sum" not in kept):
        total += 2 * scores
    elif not shape.chunked:
        total += scores
    if "residual" not in kept:
        total += 2 * dim * heads * d
    inner = not last and "residual" not in kept
    if kind == "dense":
        width = model.intermediate_size
        total += 0 if "mlp_gate_up" in kept else 4 * dim * width
        return total + (2 * dim * width if inner else 0)
    assert moe is not None
    gates = 1 if moe.vision_intermediate_size is None else 2
    total += 0 if "router" in kept else 2 * dim * moe.num_experts * gates
    if moe.num_shared_experts:
        total += 0 if "mlp_gate_up" in kept else 4 * dim * moe.shared_intermediate_size
        total += 2 * dim * moe.shared_intermediate_size if inner else 0
    widths = (("expert_gate_up", moe.intermediate_size), ("vision_expert_gate_up", moe.vision_intermediate_size or 0))
    for tag, width in widths:
        rows = moe.num_experts_per_tok / gates
        total += rows * dim * width * ((0 if tag in kept else 4) + (2 if inner else 0))
    return total


def _block_flops(model: ModelConfig, shape: StepShape, kept: tuple[str, ...], chunk: int) -> float:
    """Of a patch in a block of the tower. Attention stays within a frame: by tiles a patch meets between one of them and all of the
    device's, of which the middle counts, as in `program_flops`; the dense kernel computes all."""
    vision = model.vision
    assert vision is not None
    met = _tiles_met(shape.patches, chunk) if shape.vision_chunked else shape.patches
    dim, scores = vision.hidden_size, 2 * vision.hidden_size * met
    total = 0.0
    total += 0 if "vit_qkv" in kept else 6 * dim * dim
    if "vit_attn_out" not in kept or (shape.vision_chunked and "vit_attn_log_sum" not in kept):
        total += 2 * scores
    elif not shape.vision_chunked:
        total += scores
    total += 0 if "vit_residual" in kept else 2 * dim * dim
    return total + (0 if "vit_act" in kept else 2 * dim * vision.intermediate_size)


def _tiles_met(length: int, chunk: int) -> float:
    """Tokens of the tiles that a tile meets: of a causal row all N up to its own, (N + 1) / 2 on average."""
    chunk = min(chunk, length)
    return chunk * (math.ceil(length / chunk) + 1) / 2
