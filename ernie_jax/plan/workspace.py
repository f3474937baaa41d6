"""What the fullest moments of a backward pass need beside what is kept, in bytes of one device: experts, their exchange, the loss.

n tokens of a microbatch and device, D model, F expert width, E experts of a device, R rows of its experts, G n rows received, V
vocabulary, t tensor shards.
"""

from __future__ import annotations

import math
from collections import Counter

from ernie_jax.config.run import RunConfig
from ernie_jax.plan.activation_memory import FLOAT, Bytes, LayerSizes, mlp_backward, parts
from ernie_jax.sharding import BATCH_AXES, Layout


def expert_gradients(run: RunConfig, sizes: LayerSizes, layout: Layout) -> Bytes:
    """While a layer's experts are differentiated: both gradients of their weights, sums in float32 of one expert, its weights; and
    the gradients of the shared experts.

    Where the mesh splits what one expert needs, the layer's weights are brought together first.
    """
    moe = run.model.moe
    assert moe is not None
    t, w = sizes.shape.tensor, sizes.shape.width
    one = 3 * run.model.hidden_size * sum(sizes.expert_widths) / t
    own = moe.num_experts / layout.shards("expert")
    gathered = 0.0
    axes = [axis for axis in layout.rules.mesh_axes("expert_embed") if axis != "pipeline"]
    if layout.axis_size(*axes) > 1:
        gathered = own * one * sizes.wide
        if sizes.on_cpu and w < FLOAT:
            # As float32, and those of the second product also as integers.
            gathered += own * one / 3 * w
    shared = 3 * run.model.hidden_size * sizes.mlp_width("moe") / t * sizes.wide
    return parts(gradients=own * one * w + shared, workspace=one * FLOAT + one * w * 2 / 3, collectives=gathered)


def open_experts(sizes: LayerSizes) -> Bytes:
    """Of experts that no loop keeps apart, like `open_mlp`: rows received, rows by expert and the buffer for their gradients; gate,
    up, activation, its derivative, product and the buffer for its gradient."""
    shape = sizes.shape
    rows = ((1 + len(sizes.expert_widths)) * shape.rows + shape.sent) * sizes.model.hidden_size
    return parts(dispatch=(rows + 6 * shape.rows * sum(sizes.expert_widths) / shape.tensor) * shape.width)


def expert_moments(sizes: LayerSizes, *, kept: bool, full: bool, branch: bool) -> list[Bytes]:
    """The two fullest moments of the backward pass of a layer's experts, and that of its shared experts.

    Args:
      sizes: of the layer's arrays.
      kept: whether gate and up of the experts were kept, and need not be made again.
      full: whether nothing was kept.
      branch: whether layers are behind a branch, out of which comes all that the backward pass reads.
    """
    shape = sizes.shape
    w, t = shape.width, shape.tensor
    rows = shape.rows * sizes.model.hidden_size * w
    width = shape.rows * sum(sizes.expert_widths) / t * w
    # One buffer for the gradients of rows for each set of experts.
    buffers = len(sizes.expert_widths) * rows
    widest = shape.rows * max(sizes.expert_widths) / t * w
    remade = 0 if kept else 2 * width
    # The results' gradients arrive: what is sent and what is received, both there at once, as float32 on CPU; already made are the
    # experts' rows, the buffer for their gradients, and of width F the activation, its derivative and product. Out of a branch
    # 16-bit rows come on CPU as numbers and as integers.
    bits = sizes.on_cpu and w < FLOAT
    exchange = 2 * shape.sent * sizes.model.hidden_size * sizes.wide
    doubled = bits and branch
    narrow = 6 if doubled else 3 if full and not bits else 4
    arrival = exchange + buffers + (2 if doubled else 1) * rows + narrow * width + remade
    # The gradient of gate and up is made: also there are the results' gradients, by row, and those of the product. Of 16-bit ones
    # on CPU gate and up are taken apart first, and their gradient takes that place.
    middle = buffers + 2 * rows + narrow * width + remade
    moments = [parts(dispatch=arrival), parts(dispatch=middle + (0 if bits else 2 * widest))]
    if not sizes.mlp_width("moe"):
        return moments
    if t == 1 or (full and not shape.sent):
        # The experts come later, but for empty buffers; between tensor shards both gradients of results are gathered.
        middle = buffers + 3 * width
        moments.append(parts(activations=2 * sizes.gathered * sizes.wide if t > 1 else 0))
    else:
        moments.append(Counter())
    moments[-1] += parts(dispatch=middle) + mlp_backward(sizes, "moe")
    # The gradient at the shared experts' input.
    return [moment + parts(activations=sizes.gathered * sizes.wide) for moment in moments]


def loss_bytes(run: RunConfig, sizes: LayerSizes, layout: Layout) -> Bytes:
    """While the loss of a piece of tokens is differentiated: its logits' exponentials and gradients, float32, and the head's
    gradient [D, V], which the pieces add up."""
    rows = max(1, run.batch_size // run.parts // layout.axis_size(*BATCH_AXES))
    pieces = max(1, math.ceil(rows * run.seq_len / run.loss_chunk))
    width = math.ceil(run.seq_len / pieces)
    logits = rows * width * run.model.vocab_size / sizes.shape.tensor * FLOAT
    head = run.model.vocab_size * run.model.hidden_size / sizes.shape.tensor * FLOAT
    states = 2 * sizes.gathered * sizes.wide
    single = math.ceil(run.seq_len / width) == 1
    # With one piece the head's gradient is made when one of the two arrays of logits is gone.
    return parts(logits=max(2 * logits, logits + 2 * head) if single else 2 * logits + head, activations=states)
