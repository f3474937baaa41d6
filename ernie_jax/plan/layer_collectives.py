"""What one decoder layer communicates over the tensor axis, with its weights and with its experts, forward and backward.

Between blocks the sequence is split over `tensor`; a block starts from whole rows (all-gather), ends with products whose terms
lie on the devices of the axis (a sum, split along the sequence), and its transpose does the same the other way. n tokens of a
device's microbatch, D model, F width, K chosen.
"""

from __future__ import annotations

from collections.abc import Iterable

from ernie_jax.config.remat import RematPlan
from ernie_jax.plan.communication import TENSOR, Communication
from ernie_jax.plan.exchange_collectives import exchange
from ernie_jax.plan.model_weights import PlacedWeight
from ernie_jax.plan.step_sizes import StepSizes, Times, kept

# Each of the three products q, k, v has its own sum of the cotangent of their common input.
_QKV_SUMS = 3


def layer(
    out: Communication,
    step: StepSizes,
    kind: str,
    weights: Iterable[PlacedWeight],
    plan: RematPlan,
    times: Times,
    *,
    inner: bool = False,
) -> None:
    """Adds one layer.

    Args:
      out: to add to.
      step: sizes.
      kind: `dense` or `moe`.
      weights: of the layer.
      plan: what the backward pass finds kept.
      times: how often it runs.
      inner: whether layers of the same unit follow it, which need its result when they are run again.
    """
    again = 0.0 if plan.everything else times.backwards
    rerun = again if not kept(plan, "residual") else 0.0
    _attention(out, step, times, again, rerun)
    if kind == "dense":
        _mlp(out, step, step.run.model.intermediate_size, times, again, rerun if inner else 0.0, "mlp")
    else:
        _moe(out, step, plan, times, again, inner)
        exchange(out, step, plan, times, inner)
    weight_uses(out, step, weights, times)


def _attention(out: Communication, step: StepSizes, times: Times, again: float, rerun: float) -> None:
    x, dtype = step.stream, step.dtype
    out.gather(TENSOR, x, dtype, times.forwards + again, "attention")
    out.sum_split(TENSOR, x, dtype, times.forwards + rerun, "attention")
    out.gather(TENSOR, x, dtype, times.backwards, "transpose/attention")
    if step.kv_heads_split:
        out.sum_split(TENSOR, _QKV_SUMS * x, dtype, times.backwards, "transpose/attention")
        return
    # Fewer kv heads than shards: keys and values are whole on each, and so are their cotangents, once each head's are brought
    # together.
    model = step.run.model
    out.sum_split(TENSOR, x, dtype, times.backwards, "transpose/attention")
    kv = step.tokens * model.num_key_value_heads * model.head_dim
    heads = ("outer", model.num_key_value_heads)
    out.add("all-gather", TENSOR, 2 * kv, dtype, times.backwards, "transpose/attention/reshape", heads)


def _mlp(
    out: Communication, step: StepSizes, width: int, times: Times, again: float, rerun: float, scope: str, shared: bool = False
) -> None:
    """A gated MLP; of one beside experts, which take whole rows too, the input is gathered with theirs."""
    x, dtype = step.stream, step.dtype
    if not shared:
        out.gather(TENSOR, x, dtype, times.forwards + again, scope)
    out.sum_split(TENSOR, x, dtype, times.finished + rerun, scope)
    out.gather(TENSOR, x, dtype, times.backwards, f"transpose/{scope}")
    out.sum_split(TENSOR, x, dtype, times.backwards, f"transpose/{scope}")
    # The gradient of gate_up flattens [2, F] of its cotangent, which joins the parts of F: all of it comes to each device.
    out.gather(TENSOR, step.tokens * 2 * width, dtype, times.backwards, f"transpose/{scope}/reshape")


def _moe(out: Communication, step: StepSizes, plan: RematPlan, times: Times, again: float, inner: bool) -> None:
    moe, x, dtype = step.run.model.moe, step.stream, step.dtype
    assert moe is not None
    routing = step.tokens * moe.num_experts_per_tok
    rerun = again if inner and not kept(plan, "residual") else 0.0
    # Whole rows and their routing, for experts and the shared MLP. Run again for what the experts receive, or for the MLP.
    needed = again if moe.num_shared_experts or not kept(plan, "expert_received") else 0.0
    if plan.everything and step.mesh["expert"] == 1:
        # Nothing is received, so the experts' rows are taken from the input, which is kept split.
        needed = times.backwards
    out.gather(TENSOR, x, dtype, times.forwards + needed, "moe/rows")
    for kind in ("s32", "f32", "pred"):
        out.gather(TENSOR, routing, kind, times.forwards + again, "moe/router")
    if step.run.moe.capacity_factor is not None:
        # Places in the experts' queues are counted along whole rows, from a table [n K, E].
        out.gather(TENSOR, routing * moe.num_experts, "s32", times.forwards + again, "moe/capacity")
    out.add("reduce-scatter", TENSOR, x, dtype, times.finished + rerun, "moe/results")
    out.gather(TENSOR, x, dtype, times.backwards, "transpose/moe/results")
    out.sum(TENSOR, x, dtype, times.backwards, "transpose/moe/rows")
    out.sum(TENSOR, routing, dtype, times.backwards, "transpose/moe/router")
    if moe.num_shared_experts:
        _mlp(out, step, moe.shared_intermediate_size, times, again, rerun, "moe/shared_experts", shared=True)


def weight_uses(out: Communication, step: StepSizes, weights: Iterable[PlacedWeight], times: Times) -> None:
    """Adds what the use of weights costs: parts brought together (ZeRO 3) in each pass, gradients summed in each backward.

    A sum is of the whole gradient even where a device keeps a part of it.
    """
    for each in weights:
        matrix, elements = each.weight.is_matrix, each.used
        dtype = step.dtype if matrix else "f32"
        if each.gathered_over:
            out.gather(each.gathered_over, elements, dtype, times.forwards + times.backwards, "weights")
        if each.weight.path.endswith("gate_up") and not each.weight.is_expert:
            # See `_mlp`: its columns are not split over tensor while the gradient is computed.
            elements = float(each.weight.size)
        add = out.sum_split if each.moments_over else out.sum
        add(each.summed_over, elements, dtype, times.backwards, "transpose/weights")
        if each.weight.of_split_tokens:
            out.sum(TENSOR, elements, dtype, times.backwards, "transpose/weights")
