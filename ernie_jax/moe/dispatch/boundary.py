"""The edge between the automatically sharded model and the devices' own view of tokens and experts.

B batch, T tokens, D model, F expert width, E experts, K chosen; g, t, f, E_local: one device's share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ernie_jax.moe.capacity import device_capacity
from ernie_jax.moe.dispatch.protocol import ExchangePlan
from ernie_jax.moe.routing import Routing
from ernie_jax.sharding import BATCH_AXES, Layout

# x [g, t, D], routing [g, t, K], sets of gate_up [E_local, D, 2, f] and down [E_local, f, D], their stacks, plan -> [g, t, D]
# and a pytree of scalars or vectors that are to be summed over the devices
DeviceBody = Callable[[jax.Array, Routing, Any, Any, ExchangePlan], tuple[jax.Array, Any]]


def on_each_device(
    body: DeviceBody,
    x: jax.Array,
    routing: Routing,
    weights: Sequence[Any],
    stacks: Sequence[Any],
    layout: Layout,
    capacity_factor: float | None,
) -> tuple[jax.Array, Any]:
    """Run `body` under `shard_map` over the mesh: tokens over (data, expert), experts over expert, widths over tensor.

    Inside a `shard_map` over some axes, such as a pipeline stage, it is over the other ones.

    The token spec is forced here whatever sharding x arrives with: taking it from x could repeat tokens unnoticed. Sizes that
    the mesh does not divide are padded with tokens that go nowhere.

    Args:
      body: the computation of one device; its result is the part of y that its slice of the expert width contributes.
      x: [B, T, D].
      routing: [B, T, K] over the experts of all sets as `shard_major` numbers them; the number of them all goes nowhere.
      weights: for each set of experts, a pytree with `gate_up` [E, D, 2, F] and `down` [E, F, D]; E is the same in all.
      stacks: for each set a pytree with `gate_up` [R, E, D, 2, F], `down` [R, E, F, D] and scalars, or None.
      layout: mesh and rules.
      capacity_factor: the capacity that was applied to the routing, None for none; it bounds what a peer can be sent.

    Returns:
      ([B, T, D], the body's sums over all devices).
    """
    groups, tensor = layout.axis_size(*BATCH_AXES), layout.axis_size("tensor")
    original, (batch, tokens, dim) = x.shape, x.shape
    sets = len(weights)
    num_experts = weights[0].down.shape[0]
    rows_intact = batch % groups == 0
    if not (rows_intact and tokens % tensor == 0):
        x, routing = _as_grid(x, routing, groups, tensor, sets * num_experts)
    shards = layout.shards("expert")
    bucket_rows = expert_rows = None
    if capacity_factor is not None and rows_intact:
        k = routing.expert_index.shape[-1]
        own = device_capacity(tokens, num_experts, k, capacity_factor, shards=shards, sets=sets)
        bucket_rows, expert_rows = batch // groups * min(tokens, own), batch // groups * shards * own
    plan = ExchangePlan(num_experts=sets * num_experts, shards=shards, bucket_rows=bucket_rows, expert_rows=expert_rows)
    sequence_sharded = "tensor" in layout.rules.mesh_axes("sequence")

    def device(x: jax.Array, routing: Routing, weights: Any, stacks: Any) -> tuple[jax.Array, Any]:
        y, sums = body(x, routing, weights, stacks, plan)
        sums = jax.tree.map(lambda a: a[None], sums)
        if tensor == 1:
            return y, sums
        # Each tensor shard holds the products of its slice of the expert width: add them, and keep only this shard's
        # part of the sequence where that is how activations are laid out.
        if sequence_sharded:
            return jax.lax.psum_scatter(y, "tensor", scatter_dimension=1, tiled=True), sums
        return jax.lax.psum(y, "tensor"), sums

    rows = layout.automatic(PartitionSpec(BATCH_AXES))
    first, second = layout.spec(("expert", None, None, "expert_mlp")), layout.spec(("expert", "expert_mlp", None))
    single = {4: first, 3: second}
    stacked = {5: PartitionSpec(None, *first), 4: PartitionSpec(None, *second), 0: PartitionSpec()}
    y, sums = jax.shard_map(
        device,
        mesh=layout.mesh_in_force,
        axis_names=set(layout.automatic_axes),
        in_specs=(
            rows,
            Routing(rows, rows),  # type: ignore[arg-type]
            jax.tree.map(lambda a: single[a.ndim], tuple(weights)),
            jax.tree.map(lambda a: stacked[a.ndim], tuple(stacks)),
        ),
        out_specs=(PartitionSpec(*rows, "tensor") if sequence_sharded else rows, PartitionSpec(layout.automatic_axes)),
        # Nested in manual pipeline stages the check fails to lower; tests compare gradients with one device instead.
        check_vma=False,
    )(x, routing, tuple(weights), tuple(stacks))
    y = y if y.shape == original else y.reshape(-1, dim)[: batch * tokens].reshape(original)
    return y, jax.tree.map(lambda a: a.sum(axis=0), sums)


def shard_major(expert_index: jax.Array, num_experts: int, sets: int, shards: int) -> jax.Array:
    """Numbers experts so that each device's are in sequence: E / G of the first set, E / G of the second, and so on.

    A device then has a run of numbers, which is all that a dispatcher knows of experts, and holds the same share of every set.

    Args:
      expert_index: set * E + expert; sets * E goes nowhere and stays as it is.
      num_experts: E, experts of one set.
      sets: how many.
      shards: G, which divides E.
    """
    if sets == 1 or shards == 1:
        return expert_index
    each = num_experts // shards
    of_set, expert = expert_index // num_experts, expert_index % num_experts
    number = (expert // each) * (sets * each) + of_set * each + expert % each
    return jnp.where(expert_index < sets * num_experts, number, expert_index)


def _as_grid(x: jax.Array, routing: Routing, groups: int, tensor: int, num_experts: int) -> tuple[jax.Array, Routing]:
    """[B, T, ...] as [groups, tokens', ...] with tokens' a multiple of `tensor`, the added tokens routed nowhere."""
    count = x.shape[0] * x.shape[1]
    each = math.ceil(count / (groups * tensor)) * tensor
    extra = groups * each - count

    def grid(a: jax.Array, fill: float) -> jax.Array:
        flat = a.reshape(count, a.shape[-1])
        return jnp.pad(flat, ((0, extra), (0, 0)), constant_values=fill).reshape(groups, each, a.shape[-1])

    return grid(x, 0), Routing(grid(routing.expert_index, num_experts), grid(routing.weights, 0))
