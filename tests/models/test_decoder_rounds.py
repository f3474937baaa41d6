"""Layers of which only some are run, as in a pipeline stage with fewer of them: what the loop over them keeps."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from ernie_jax.config import ComputeConfig
from ernie_jax.models import build_model
from ernie_jax.models.decoder import Collect
from ernie_jax.models.inputs import TextInputs
from ernie_jax.testing import tiny_moe

LAYERS = 5


def shapes_in(jaxpr):
    """Of all values of a program, inner programs too."""
    for equation in jaxpr.eqns:
        yield from (tuple(v.aval.shape) for v in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from shapes_in(inner)


@pytest.mark.parametrize(("dtype", "remat"), [("float32", "full"), ("bfloat16", "full"), ("bfloat16", "attention")])
def test_weights_are_not_kept_once_a_layer(dtype, remat):
    config = tiny_moe(num_hidden_layers=LAYERS, layer_start=0)
    model = build_model(config, ComputeConfig(dtype=dtype, remat=remat), None, nnx.Rngs(0))
    graphdef, state = nnx.split(model)
    ids = jnp.zeros((2, 8), jnp.int32)
    inputs = TextInputs(ids, segment_ids=ids + 1, position_ids=jnp.broadcast_to(jnp.arange(8), (2, 8)))

    def loss(state, x, count):
        model = nnx.merge(graphdef, state)
        (segment,) = model.decoder.segments
        y, _, _, _ = segment.run(x, model.context(inputs), None, Collect(), count)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    x = jnp.ones((2, 8, config.hidden_size), dtype)
    program = jax.make_jaxpr(jax.grad(loss))(state, x, jnp.int32(3))
    found = set(shapes_in(program.jaxpr))
    gate_up = (LAYERS, config.moe.num_experts, config.hidden_size)
    assert any(shape[:3] == gate_up for shape in found), "the stacks are there"
    assert not [shape for shape in found if shape[1:4] == gate_up]
