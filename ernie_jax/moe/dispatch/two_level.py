"""Expert exchange in two steps: between nodes, then within the node. E experts, G devices of the expert axis, N nodes of P.

A token crosses to a node once, however many of its experts live there, and is then spread among the node's devices; results are
added within the node and return as one row. Each step is an exchange with buckets of its own: the first sees each node as one
peer with E / N experts, at the device of the same place in the node; the second is the flat exchange of those P devices.

Between nodes a bucket has n rows, one for each token, or P times what one peer may be sent; within a node up to N times that,
since a device passes on what N devices sent it. So the buffer of the second step is as large as that of the flat exchange, and
what crosses between nodes is P times less.
"""

from __future__ import annotations

from dataclasses import replace

from ernie_jax.moe.dispatch.all_to_all import AllToAllDispatcher
from ernie_jax.moe.dispatch.protocol import ExchangePlan


def two_level(plan: ExchangePlan) -> AllToAllDispatcher:
    """The dispatcher of a plan whose `nodes` says how the expert axis spreads: its first P devices are the first node, and so on.

    Raises:
      ValueError: no number of nodes, or one that does not divide the devices of the expert axis.
    """
    nodes, shards = plan.nodes, plan.shards
    if nodes is None:
        raise ValueError(
            f"dispatch='two_level' needs to know over how many nodes the {shards} devices of mesh axis {plan.axis!r} spread; set "
            "config.moe.expert_nodes, or use dispatch='all_to_all'"
        )
    if nodes < 1 or shards % nodes:
        raise ValueError(
            f"expert_nodes={nodes} does not divide the {shards} devices of mesh axis {plan.axis!r}; each node needs as many of them"
        )
    each = shards // nodes
    across = tuple(tuple(range(place, shards, each)) for place in range(each))
    within = tuple(tuple(range(node * each, (node + 1) * each)) for node in range(nodes))

    def rows(peers: int) -> int | None:
        return None if plan.bucket_rows is None else peers * plan.bucket_rows

    of_node = replace(plan, num_experts=plan.num_experts // nodes, shards=each, bucket_rows=rows(nodes))
    of_nodes = replace(plan, shards=nodes, bucket_rows=rows(each))
    return AllToAllDispatcher(of_nodes, groups=across, inner=AllToAllDispatcher(of_node, groups=within))
