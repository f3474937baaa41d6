"""Tokens to their experts and back, for the experts of all modalities in one exchange, or in parts (see `exchange_parts`).

B batch, T tokens, D model, E experts of a modality, K chosen, F width of a modality's experts; g, t, f, R: one device's share.

Text experts are numbered 0 .. E-1, vision experts E .. 2E-1, and they have widths of their own. A device sorts the rows it got
by expert, the text rows first, so that each modality's rows stand together: two grouped matmuls, each over its own rows alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ernie_jax.config.compute import ComputeConfig
from ernie_jax.moe.dispatch import (
    Dispatcher,
    ExchangePlan,
    Residuals,
    exchange_formats,
    make_dispatcher,
    on_each_device,
    shard_major,
)
from ernie_jax.moe.exchange_parts import chunk_slices, routing_of, set_exchanges
from ernie_jax.moe.experts import Experts, ExpertStack, ExpertWeights, QuantizedExperts
from ernie_jax.moe.fp8_experts import Fp8Experts
from ernie_jax.moe.grouped_matmul import grouped_matmul
from ernie_jax.moe.places import to_places
from ernie_jax.moe.quantized_products import GroupedProducts, RowGroups
from ernie_jax.moe.routing import Routing
from ernie_jax.nn.activation import gated_rows
from ernie_jax.nn.fp8 import Fp8Counts
from ernie_jax.parallel import after
from ernie_jax.sharding import current_layout

# What the backward pass of `remat="none"` keeps: the rest is cheaper to compute again than to write and read.
_KEEP = jax.checkpoint_policies.save_only_these_names("expert_gate_up", "vision_expert_gate_up", "expert_sort", "expert_received")


class ServedSet(NamedTuple):
    """The experts of one modality on this device: which (0 text, 1 vision), their weights, and where these are kept or None."""

    number: int
    weights: ExpertWeights
    stack: ExpertStack | QuantizedExperts | None


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
    plan = replace(plan, formats=exchange_formats(compute.exchange_dtype, compute.exchange_backward), nodes=compute.expert_nodes)
    groups, tokens, dim = x.shape
    x, routing = jax.tree.map(lambda a: a.reshape(groups * tokens, a.shape[-1]), (x, routing))
    served = [ServedSet(*of_set) for of_set in zip(range(len(sets)), sets, stacks, strict=True)]
    # No chunk needs what another gives, so the exchange of one can go on while the experts of another compute.
    chunks = []
    for part in chunk_slices(groups * tokens, 1 if plan.shards == 1 else compute.exchange_chunks):
        own = Routing(routing.expert_index[part], routing.weights[part])
        chunks.append(_chunk(compute, hidden_act, x[part], own, served, plan))
    parts, counts = zip(*chunks, strict=True)
    y = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    return y.reshape(groups, tokens, dim), jax.tree.map(lambda *of_chunks: sum(of_chunks[1:], of_chunks[0]), *counts)


def _chunk(
    compute: ComputeConfig, hidden_act: str, x: jax.Array, routing: Routing, sets: Sequence[ServedSet], plan: ExchangePlan
) -> tuple[jax.Array, tuple[Fp8Counts, ...]]:
    """[n, D] through this device's part of all experts, all modalities in one exchange or each in its own."""
    exchanges = set_exchanges(compute.exchange_order, len(sets), plan)
    sent: list[tuple[Dispatcher, jax.Array, jax.Array, Residuals]] = []
    for exchange in exchanges:
        own = routing_of(exchange, routing, len(sets), plan)
        if sent:
            # Known only once the exchange before has arrived, by the sizes it gave: so they start in their order.
            own = replace(own, expert_index=after(own.expert_index, sent[-1][2], everywhere=True))
        dispatcher = make_dispatcher(compute.dispatch, exchange.plan)
        with jax.named_scope("moe_dispatch"):
            sent.append((dispatcher, *dispatcher.dispatch(x, own)))
    results: list[jax.Array] = []
    counts: dict[int, Fp8Counts] = {}
    for exchange, (dispatcher, rows, sizes, residuals) in zip(exchanges, sent, strict=True):
        row_weights, residuals = residuals.take_weights()
        if compute.fp8 is None:
            rows = checkpoint_name(rows, "expert_in")
        out, counted = _experts(compute, hidden_act, rows, row_weights, sizes, [sets[number] for number in exchange.sets])
        counts |= counted
        results.append(dispatcher.combine(out, residuals))
    return functools.reduce(jnp.add, results), tuple(counts[number] for number in sorted(counts))


def _experts(
    compute: ComputeConfig, hidden_act: str, rows: jax.Array, row_weights: jax.Array, sizes: jax.Array, sets: Sequence[ServedSet]
) -> tuple[jax.Array, dict[int, Fp8Counts]]:
    """rows [R, D], sorted by expert, the sets one behind the other -> ([R, D], each row times its weight; counts by set)."""
    each = sizes.shape[0] // len(sets)
    out: jax.Array | None = None
    counts: dict[int, Fp8Counts] = {}
    with jax.named_scope("experts"):
        for i, (number, weights, stack) in enumerate(sets):
            own, before = sizes[i * each : (i + 1) * each], sizes[: i * each].sum() if i else None
            if compute.fp8 is None:
                assert not isinstance(stack, QuantizedExperts)
                product = functools.partial(
                    grouped_matmul, group_sizes=own, backend=compute.grouped_matmul, first_row=before, sets=len(sets)
                )
                tag = "vision_expert" if number else "expert"
                part = _gated_products(rows, row_weights, weights, stack, product, hidden_act, tag)
            else:
                assert not isinstance(stack, ExpertStack)
                experts = Fp8Experts(compute.fp8, GroupedProducts(compute.grouped_matmul, len(sets)), hidden_act)
                part, counts[number] = experts(rows, row_weights, weights, stack or weights.quantized(), RowGroups(own, before))
            # Rows of another modality are zero in it.
            out = part if out is None else out + part
    assert out is not None
    return out, counts


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
    hidden = gated_rows(hidden.reshape(-1, 2, width), row_weights, hidden_act)
    return product(checkpoint_name(hidden, f"{tag}_act"), weights.down, stack=second)
