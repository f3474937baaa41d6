"""What layers keep for their backward pass, and what a layer needs while its backward pass runs, in bytes of one device.

Formulas of arrays, by name. n tokens of a microbatch and device, s = n / t of them between blocks, D model, hq/hk query/kv heads,
d head width, T sequence, I width of a dense layer, S of the shared experts, F of an expert, R rows of a device's experts, t tensor
shards. `wide` is float32, `w` the compute format: XLA:CPU multiplies 16-bit numbers as float32 copies, so there the arrays around a
product are wide whatever the format; on other platforms they are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ernie_jax.config.model import ModelConfig
from ernie_jax.config.remat import Remat, remat_plan, remat_within
from ernie_jax.config.run import RunConfig
from ernie_jax.models.decoder import kinds_of
from ernie_jax.sharding import Layout
from ernie_jax.train.remat_prediction import StepShape, tag_bytes, unit_bytes

FLOAT = INT = 4
# XLA:CPU gives sums over so many numbers to a library, whose operands stand in memory.
LIBRARY_SUM = 2**20
Bytes = Counter[str]


def parts(**sizes: float) -> Bytes:
    """Bytes by category."""
    found: Bytes = Counter()
    found.update(sizes)
    return found


def times(count: float, sizes: Bytes) -> Bytes:
    """Each category so many times."""
    return parts(**{name: count * size for name, size in sizes.items()})


@dataclass(frozen=True)
class LayerSizes:
    """Numbers of elements of a layer's arrays on a device.

    Attributes:
      shape: of the step.
      model: of the run.
      stream: s D, between blocks.
      gathered: n D, at the input of a product that is split over `tensor`.
      query, value: of q, and of k or v.
      scores: of the attention weights of the dense kernel, 0 without.
      wide: bytes of a number around a product.
      received: bytes of a number that the exchange brings.
      on_cpu: whether arrays are those of XLA:CPU.
      backend: of attention, `chunked`, `dense` or `fused`.
    """

    shape: StepShape
    model: ModelConfig
    stream: float
    gathered: float
    query: float
    value: float
    scores: float
    wide: int
    received: float
    on_cpu: bool
    backend: str

    @classmethod
    def of(cls, run: RunConfig, shape: StepShape, layout: Layout, platform: str) -> LayerSizes:
        """Of a run's layers on a platform."""
        model, n, t = run.model, shape.tokens, shape.tensor
        gathered = n * model.hidden_size
        query = n * model.num_attention_heads * model.head_dim / t
        # Fewer kv heads than tensor shards are whole on each (`make_layout`).
        value = n * model.num_key_value_heads * model.head_dim / layout.shards("kv_heads")
        fused = platform == "gpu" and shape.width == 2
        backend = "chunked" if shape.chunked else "fused" if fused and run.attention in ("auto", "cudnn") else "dense"
        scores = n * model.num_attention_heads / t * run.seq_len if backend == "dense" else 0.0
        on_cpu = platform == "cpu"
        wide = FLOAT if on_cpu else shape.width
        # In 8 bits with a scale for 128; of 16 and 32 bits what is kept is widened like all else.
        received = 1 + FLOAT / 128 if run.moe.exchange_dtype in ("fp8", "int8") else wide
        return cls(shape, model, gathered / t, gathered, query, value, scores, wide, received, on_cpu, backend)

    def tags(self) -> dict[tuple[str, str], float]:
        """`tag_bytes` of what was kept of several layers, which XLA:CPU converts before the loop that reads it."""
        sizes = tag_bytes(self.model, replace(self.shape, width=self.wide))
        if ("moe", "expert_received") in sizes:
            sizes["moe", "expert_received"] += self.shape.sent * self.model.hidden_size * (self.received - self.wide)
        return sizes

    def mlp_width(self, kind: str) -> int:
        """I of a dense layer, S of a layer of experts (0 without shared ones)."""
        moe = self.model.moe
        return self.model.intermediate_size if kind == "dense" or moe is None else moe.shared_intermediate_size

    @property
    def expert_widths(self) -> tuple[int, ...]:
        """F of each set of experts, text and vision, which share the rows."""
        moe = self.model.moe
        return () if moe is None else tuple(w for w in (moe.intermediate_size, moe.vision_intermediate_size) if w)

    def local_experts(self) -> bool:
        """Whether no rows are exchanged: then the experts start from the tokens at hand."""
        return not self.shape.sent


def everything_bytes(sizes: LayerSizes, kind: str) -> Bytes:
    """What a layer under the policy `none` keeps, inside a scan over several: the residuals of all its operations."""
    shape, model, w = sizes.shape, sizes.model, sizes.wide
    t, n = shape.tensor, shape.tokens
    # Each norm: its input and twice that (the gradient of the square) in float32, the normed rows in the compute format, and
    # the scaled rows, gathered where a product over `tensor` takes them.
    norms = 2 * (2 * sizes.stream * FLOAT + sizes.stream * w + sizes.gathered * w)
    # q, k, v; the kernel's output, and the same once more as the input of the projection behind it.
    attention = (2 * sizes.query + 2 * sizes.value) * w + sizes.query * w
    # The dense kernel: exponentials and normed weights, float32.
    attention += 2 * sizes.scores * FLOAT
    if sizes.backend != "dense":
        attention += n * model.num_attention_heads / t * FLOAT
    mlp = sizes.mlp_width(kind)
    # Gate, up, and their product.
    activations = norms + attention + 3 * n * mlp * w / t
    if kind == "dense":
        return parts(activations=activations)
    if not mlp and not sizes.local_experts():
        # Nobody else takes the gathered rows, and the experts keep what they received instead.
        activations -= sizes.gathered * w
    moe = model.moe
    assert moe is not None
    tags = sizes.tags()
    kept = ("expert_sort", "expert_received", "expert_gate_up", "vision_expert_gate_up")
    # The router's input and two arrays of scores in float32, K masks of the chosen, and a dozen numbers a token.
    router = sizes.stream * FLOAT + n / t * (moe.num_experts * (2 * FLOAT + moe.num_experts_per_tok) + 12 * FLOAT)
    return parts(activations=activations, dispatch=router + sum(tags["moe", tag] for tag in kept))


def kept_by_unit(sizes: LayerSizes, policy: Remat, unit: Sequence[str]) -> Bytes:
    """What one repetition of a unit of layers keeps under a policy, of several in a scan."""
    plan = remat_plan(remat_within(policy, kinds_of(unit, sizes.model)))
    if plan.everything:
        total: Bytes = Counter()
        for kind in unit:
            total.update(everything_bytes(sizes, kind))
        return total
    kept = unit_bytes(sizes.model, replace(sizes.shape, width=sizes.wide), policy, unit)
    assert kept is not None
    tags = sizes.tags()
    of_experts = ("router", "expert_sort", "expert_received", "expert_gate_up", "vision_expert_gate_up")
    found = [(kind, tag) for kind in unit for tag in plan.saved if tag in of_experts and (kind, tag) in tags]
    plain = tag_bytes(sizes.model, replace(sizes.shape, width=sizes.wide))
    return parts(activations=kept - sum(plain[key] for key in found), dispatch=sum(tags[key] for key in found))


def open_layer(sizes: LayerSizes, *, remade: bool) -> Bytes:
    """What of a layer's stream and attention is there from when its activations are (made again or taken from where they are
    kept) until its backward pass ends; without its MLP and experts. `remade`: they are made again."""
    wide = sizes.wide
    # Layer's input, stream behind attention, cotangent.
    stream, gathered, heads, values = 3, 2, 2, 2
    workspace = 0.0
    if sizes.on_cpu:
        # Twice each norm's input; other backends make them where they are used.
        stream += 2
        if sizes.stream >= LIBRARY_SUM:
            # The factors of normed rows, written out for every number of theirs.
            stream += 4 if remade and sizes.shape.tensor == 1 else 1
        if sizes.backend == "chunked":
            # Tiles of q, k and v, q turned, and the sums of their gradients.
            workspace = (3 * sizes.query + 4 * sizes.value) * FLOAT - 2 * sizes.value * wide
            heads = 1
        else:
            workspace = sizes.query * wide
        # Weights of the four projections, turned.
        model = sizes.model
        workspace += 2 * (sizes.query + sizes.value) / sizes.shape.tokens * model.hidden_size * FLOAT
    elif sizes.backend == "fused":
        workspace = sizes.query * FLOAT
    # Weights and their gradient.
    workspace += 2 * sizes.scores * FLOAT
    activations = stream * sizes.stream + gathered * sizes.gathered + heads * sizes.query + values * sizes.value
    return parts(activations=activations * wide, workspace=workspace)


def open_mlp(sizes: LayerSizes, kind: str, *, remade: bool) -> Bytes:
    """Of the gated MLP of a layer that no loop keeps apart: gate, up, activation and product, and without recomputation also the
    derivative of the activation, that the forward pass leaves."""
    count = (4 if remade else 5) if sizes.on_cpu else 3
    return parts(activations=count * sizes.shape.tokens * sizes.mlp_width(kind) / sizes.shape.tensor * sizes.wide)


def mlp_backward(sizes: LayerSizes, kind: str) -> Bytes:
    """While the backward pass of a gated MLP runs: gate, up, their gradients, activation, product and its gradient.

    Between several tensor shards the gradient of gate and up is gathered, and on CPU copied, before the product that gives the
    weights'; and the gradient at the input is a sum over them, of whole rows.
    """
    n, t, width = sizes.shape.tokens, sizes.shape.tensor, sizes.mlp_width(kind)
    local = n * width / t * sizes.wide
    if t == 1:
        return parts(workspace=7 * local)
    whole = 2 * n * width * sizes.wide
    copied = max(whole if sizes.on_cpu else 0, 5 * local)
    return parts(workspace=max(7 * local, whole + copied), activations=sizes.gathered * sizes.wide if kind == "dense" else 0)
