"""Tokens to their experts and back, for the experts of all modalities in one exchange.

B batch, T tokens, D model, E experts of a modality, K chosen, F width of a modality's experts; g, t, f, R: one device's share.

Text experts are numbered 0 .. E-1, vision experts E .. 2E-1, and they have widths of their own. A device sorts the rows it got
by expert, the text rows first, so that each modality's rows stand together: two grouped matmuls, each over its own rows alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
from jax.ad_checkpoint import checkpoint_name

from ernie_jax.config.compute import ComputeConfig
from ernie_jax.moe.dispatch import ExchangePlan, make_dispatcher, on_each_device, shard_major
from ernie_jax.moe.experts import Experts, ExpertStack, ExpertWeights, QuantizedExperts
from ernie_jax.moe.fp8_experts import Fp8Experts
from ernie_jax.moe.grouped_matmul import grouped_matmul
from ernie_jax.moe.places import to_places
from ernie_jax.moe.quantized_products import GroupedProducts, RowGroups
from ernie_jax.moe.routing import Routing
from ernie_jax.nn.activation import gated
from ernie_jax.nn.fp8 import Fp8Counts
from ernie_jax.sharding import current_layout

# What the backward pass of `remat="none"` keeps: the rest is cheaper to compute again than to write and read.
_KEEP = jax.checkpoint_policies.save_only_these_names("expert_gate_up", "vision_expert_gate_up", "expert_sort", "expert_received")


def apply_experts(
    x: jax.Array,
    routing: Routing,
    sets: Sequence[Experts],
    stacks: Sequence[ExpertStack | QuantizedExperts | None],
    compute: ComputeConfig,
    hidden_act: str,
) -> tuple[jax.Array, tuple[Fp8Counts, ...]]:
    """Each token's weighted sum of its experts' outputs.

    Args:
      x: [B, T, D].
      routing: [B, T, K]; expert e of set s is entry s E + e, and entries equal to E times the number of sets go nowhere.
      sets: experts of each modality, all of the same number E.
      stacks: for each set, this layer's weights among others, to be read in place, or None.
      compute: how to exchange and multiply.
      hidden_act: activation of the gate.

    Returns:
      ([B, T, D], zero for tokens that go nowhere; of each set what the casts to FP8 lost, nothing without FP8).
    """
    weights = tuple(experts.weights() for experts in sets)
    layout = current_layout()
    num_experts, shards = weights[0].down.shape[0], 1 if layout is None else layout.shards("expert")
    index = to_places(routing.expert_index, [None if experts.place is None else experts.place[...] for experts in sets])
    index = shard_major(index, num_experts, len(sets), shards)
    routing = Routing(index, routing.weights.astype(x.dtype))
    on_device: Callable[..., tuple[jax.Array, tuple[Fp8Counts, ...]]] = functools.partial(_on_device, compute, hidden_act)
    if compute.remat == "none":
        on_device = jax.checkpoint(on_device, static_argnums=4, prevent_cse=False, policy=_KEEP)
    if layout is None or layout.mesh.size == 1:
        return on_device(x, routing, weights, tuple(stacks), ExchangePlan(num_experts=len(sets) * num_experts, shards=1))
    return on_each_device(on_device, x, routing, weights, stacks, layout, compute.capacity_factor)


def _on_device(
    compute: ComputeConfig,
    hidden_act: str,
    x: jax.Array,
    routing: Routing,
    sets: Sequence[ExpertWeights],
    stacks: Sequence[ExpertStack | QuantizedExperts | None],
    plan: ExchangePlan,
) -> tuple[jax.Array, tuple[Fp8Counts, ...]]:
    """[g, t, D] with this device's experts -> ([g, t, D], the part that its slice of their width contributes; see above)."""
    dispatcher = make_dispatcher(compute.dispatch, plan)
    groups, tokens, dim = x.shape
    flat = jax.tree.map(lambda a: a.reshape(groups * tokens, a.shape[-1]), routing)
    rows, sizes, residuals = dispatcher.dispatch(x.reshape(groups * tokens, dim), flat)
    row_weights, residuals = residuals.take_weights()
    if compute.fp8 is None:
        rows = checkpoint_name(rows, "expert_in")
    each = plan.experts_per_shard // len(sets)
    out: jax.Array | None = None
    counts: list[Fp8Counts] = []
    with jax.named_scope("experts"):
        for i, (weights, stack) in enumerate(zip(sets, stacks, strict=True)):
            own, before = sizes[i * each : (i + 1) * each], sizes[: i * each].sum() if i else None
            if compute.fp8 is None:
                assert not isinstance(stack, QuantizedExperts)
                product = functools.partial(
                    grouped_matmul, group_sizes=own, backend=compute.grouped_matmul, first_row=before, sets=len(sets)
                )
                tag = "vision_expert" if i else "expert"
                part = _gated_products(rows, row_weights, weights, stack, product, hidden_act, tag)
            else:
                assert not isinstance(stack, ExpertStack)
                experts = Fp8Experts(compute.fp8, GroupedProducts(compute.grouped_matmul, len(sets)), hidden_act)
                part, count = experts(rows, row_weights, weights, stack or weights.quantized(), RowGroups(own, before))
                counts.append(count)
            # Rows of another modality are zero in it.
            out = part if out is None else out + part
    assert out is not None
    return dispatcher.combine(out, residuals).reshape(groups, tokens, dim), tuple(counts)


def _gated_products(
    rows: jax.Array,
    row_weights: jax.Array,
    weights: ExpertWeights,
    stack: ExpertStack | None,
    product: Callable[..., jax.Array],
    hidden_act: str,
    tag: str,
) -> jax.Array:
    """rows [R, D] through the gated MLPs of one set -> [R, D], weighted; zero in the rows of another."""
    num_experts, dim, _, width = weights.gate_up.shape
    first, second = (None, None) if stack is None else stack.operands()
    hidden = product(rows, weights.gate_up.reshape(num_experts, dim, 2 * width), stack=first)
    hidden = checkpoint_name(hidden, f"{tag}_gate_up")
    hidden = gated(hidden.reshape(-1, 2, width), hidden_act) * row_weights[:, None].astype(hidden.dtype)
    return product(checkpoint_name(hidden, f"{tag}_act"), weights.down, stack=second)
