"""What isolated experts cost: text rows at text width plus vision rows at vision width. T tokens, K chosen, E experts a modality.

How it is counted: the loops over blocks run as often as the routing asks, so no figure of the compiled program alone tells the
cost. The traced program of forward and backward is run here equation by equation with a fixed routing, loops and branches as
they really go, and 2 m n k is added for every product of [m, k] and [k, n] that is met. What no result needs is left out, as the
compiler leaves it out.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import ClosedJaxpr, Literal

from ernie_jax.config import ComputeConfig
from ernie_jax.moe import MoE
from ernie_jax.moe.expert_exchange import apply_experts
from ernie_jax.moe.grouped_matmul.blocks import block_counts, block_heights
from ernie_jax.moe.routing import Routing
from ernie_jax.native import switched_off
from ernie_jax.testing import tiny_moe

T, K, E, D, TEXT, VISION = 256, 2, 4, 8, 12, 4
# Of T K = 512 rows and twice four experts a block is 8 or 64 rows high; what is not more than half of a tall one goes in low ones.
LOW = 8


class Counter:
    """Runs a program and adds up the operations of its matrix products."""

    def __init__(self):
        self.flops = 0

    def run(self, program, args, wanted=None):
        """The results; of those that are not wanted, perhaps None."""
        jaxpr, consts = (program.jaxpr, program.consts) if isinstance(program, ClosedJaxpr) else (program, [])
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        wanted = [True] * len(jaxpr.outvars) if wanted is None else wanted
        needed = {v for v, want in zip(jaxpr.outvars, wanted, strict=True) if want and not isinstance(v, Literal)}
        kept = []
        for equation in reversed(jaxpr.eqns):
            if needed.intersection(equation.outvars):
                kept.append(equation)
                needed.update(v for v in equation.invars if not isinstance(v, Literal))

        def read(v):
            return v.val if isinstance(v, Literal) else values.get(v)

        for equation in reversed(kept):
            out = self.equation(equation, [read(v) for v in equation.invars], [v in needed for v in equation.outvars])
            values.update(zip(equation.outvars, out, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, equation, given, wanted):
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            (contracted, _), (batch, _) = params["dimension_numbers"]
            assert not batch
            inner = int(np.prod([given[0].shape[d] for d in contracted]))
            self.flops += 2 * (given[0].size // inner) * inner * (given[1].size // inner)
        elif "call_jaxpr" in params or "dot_general" in str(equation):
            if name == "while":
                return self.loop(params, given)
            if name == "cond":
                return self.run(params["branches"][int(given[0])], given[1:], wanted)
            assert name != "scan"
            return self.run(params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"], given, wanted)
        out = equation.primitive.bind(*given, **params)
        return out if equation.primitive.multiple_results else [out]

    def loop(self, params, given):
        conditions, bodies = params["cond_nconsts"], params["body_nconsts"]
        condition, body, carry = given[:conditions], given[conditions : conditions + bodies], given[conditions + bodies :]
        while self.run(params["cond_jaxpr"], [*condition, *carry])[0]:
            carry = self.run(params["body_jaxpr"], [*body, *carry])
        return carry


def flops_of(function, *args):
    counter = Counter()
    # A native kernel would be a name without FLOPs.
    with switched_off():
        counter.run(jax.make_jaxpr(function)(*args), jax.tree.leaves(args))
    return counter.flops


@pytest.fixture(scope="module")
def layer():
    config = tiny_moe(hidden_size=D)
    sizes = {"num_experts": E, "num_experts_per_tok": K, "num_shared_experts": 0}
    moe = replace(config.moe, **sizes, intermediate_size=TEXT, vision_intermediate_size=VISION)
    return MoE(replace(config, moe=moe), ComputeConfig(grouped_matmul="blocks"), rngs=nnx.Rngs(0))


def products(rows, width):
    """FLOPs of gate, up and down, forward and twice that backward."""
    return 3 * 2 * rows * 3 * D * width


def exchange_flops(layer, index):
    """FLOPs of the experts, forward and backward to the tokens and to all weights, with these experts [T, K] chosen."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, T, D)), jnp.float32)
    parts = nnx.split((layer.experts, layer.vision_experts))
    routing = Routing(jnp.asarray(index, jnp.int32)[None], jnp.full((1, T, K), 1 / K))

    def loss(x, weights):
        sets = nnx.merge(parts[0], weights)
        return (apply_experts(x, routing, sets, (None, None), layer.compute, layer.hidden_act)[0] ** 2).sum()

    return flops_of(jax.value_and_grad(loss, (0, 1)), x, parts[1])


def chosen(*sizes):
    """[T, K] experts of two sets with so many rows each; what is left goes nowhere."""
    index = np.repeat(np.arange(2 * E), sizes)
    return np.concatenate([index, np.full(T * K - len(index), 2 * E)]).reshape(T, K)


@pytest.mark.parametrize(
    ("text", "vision"),
    [
        ((64, 64, 128, 256), (0, 0, 0, 0)),
        ((64, 24, 32, 128), (64, 64, 64, 24)),
        ((0, 16, 0, 0), (128, 0, 16, 256)),
        ((0, 0, 0, 0), (128, 128, 128, 128)),
        ((0, 0, 0, 0), (0, 0, 0, 0)),
    ],
)
def test_rows_cost_the_width_of_their_own_modality(layer, text, vision):
    """Groups of whole blocks: no row is computed that is not there, so the figures are exact."""
    assert block_heights(T * K, 2 * E) == (8 * LOW, LOW)
    got = exchange_flops(layer, chosen(*text, *vision))
    assert got == products(sum(text), TEXT) + products(sum(vision), VISION)


def test_a_row_more_is_a_block_more_of_its_own_width(layer):
    before = exchange_flops(layer, chosen(16, 16, 16, 16, 16, 16, 16, 16))
    assert exchange_flops(layer, chosen(16, 17, 16, 16, 16, 16, 16, 16)) - before == products(LOW, TEXT)
    assert exchange_flops(layer, chosen(16, 16, 16, 16, 16, 16, 17, 16)) - before == products(LOW, VISION)


def test_a_batch_as_its_gates_route_it(layer):
    """A layer with 100 text and 156 vision tokens: blocks of the groups that the gates make, and the gates' own products."""
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, T, D)), jnp.float32)
    modality = jnp.arange(T)[None] >= 100
    valid = jnp.ones((1, T), bool)
    _, output = layer(x, valid, modality)
    loads = np.asarray(output.stats.load), np.asarray(output.vision.load)
    assert [load.sum() for load in loads] == [100 * K, 156 * K]
    rows = []
    for load in loads:
        counts = block_counts(jnp.asarray(load, jnp.int32), (8 * LOW, LOW))
        rows.append(int(sum(count.sum() * height for count, height in zip(counts, (8 * LOW, LOW), strict=True))))
    graphdef, *state = nnx.split(layer, nnx.Param, ...)

    def loss(x, params, rest):
        return (nnx.merge(graphdef, params, rest)(x, valid, modality)[0] ** 2).sum()

    got = flops_of(jax.value_and_grad(loss, (0, 1)), x, *state)
    gates = 2 * 3 * 2 * T * D * E
    assert got == products(rows[0], TEXT) + products(rows[1], VISION) + gates
    # Far from both sets over all rows, and from all rows at the wider width.
    assert got - gates < 0.85 * products(T * K, TEXT)
