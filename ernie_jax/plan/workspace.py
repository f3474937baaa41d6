"""What the fullest moments of a backward pass need beside what is kept, in bytes of one device: experts, their exchange, the loss.

n tokens of a microbatch and device, D model, F expert width, E experts of a device, R rows of its experts, G n rows received, V
vocabulary, t tensor shards.
"""

from __future__ import annotations

import math

from ernie_jax.config.run import RunConfig
from ernie_jax.plan.activation_memory import FLOAT, Bytes, LayerSizes, mlp_backward, parts
from ernie_jax.sharding import BATCH_AXES, Layout


def expert_gradients(run: RunConfig, sizes: LayerSizes, layout: Layout) -> Bytes:
    """While a layer's experts are differentiated: both gradients of their weights, sums in float32 of one expert, its weights.

    Where the mesh splits what one expert needs, the layer's weights are brought together first.
    """
    moe = run.model.moe
    assert moe is not None
    t, w = sizes.shape.tensor, sizes.shape.width
    one = 3 * run.model.hidden_size * sizes.expert_width() / t
    own = moe.num_experts / layout.shards("expert")
    gathered = own * one * w if layout.axis_size(*(a for a in layout.rules.mesh_axes("expert_embed") if a != "pipeline")) > 1 else 0
    return parts(gradients=own * one * w, workspace=one * FLOAT + one * w * 2 / 3, collectives=gathered)


def expert_moments(sizes: LayerSizes, *, kept: bool, full: bool) -> list[Bytes]:
    """The two fullest moments of the backward pass of a layer's experts, and that of its shared experts.

    Args:
      sizes: of the layer's arrays.
      kept: whether gate and up of the experts were kept, and need not be made again.
      full: whether nothing was kept.
    """
    shape = sizes.shape
    w, t = shape.width, shape.tensor
    rows = shape.rows * sizes.model.hidden_size * w
    width = shape.rows * sizes.expert_width() / t * w
    remade = 0 if kept else 2 * width
    # The results' gradients arrive: what is sent and what is received, both there at once, as float32 on CPU; already made are the
    # experts' rows (on CPU also as integers, where they have 16 bits), the buffer for their gradients, and of width F the
    # activation, its derivative and product.
    bits = sizes.on_cpu and w < FLOAT
    exchange = 2 * shape.sent * sizes.model.hidden_size * sizes.wide
    narrow = 6 if bits else 3 if full else 4
    arrival = exchange + (3 if bits else 2) * rows + narrow * width + remade
    # The gradient of gate and up is made: also there are the results' gradients, by row, and those of the product.
    narrow = 3 if full and not bits else 4
    middle = 3 * rows + narrow * width + remade
    moments = [parts(dispatch=arrival), parts(dispatch=middle + 2 * width)]
    if sizes.mlp_width("moe"):
        moments.append(parts(dispatch=middle) + mlp_backward(sizes, "moe"))
    # The gradient at the shared experts' input.
    shared = parts(activations=sizes.gathered * sizes.wide if sizes.mlp_width("moe") else 0)
    return [moment + shared for moment in moments]


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
