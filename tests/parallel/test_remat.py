"""Policies change memory and nothing else: loss and gradients are those of `none`, what is kept meanwhile is the table's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ernie_jax.config import ComputeConfig
from ernie_jax.config.remat import remat_plan
from ernie_jax.models import abstract_model
from ernie_jax.models.inputs import TextInputs
from ernie_jax.objectives.pretraining import RouterLossWeights
from ernie_jax.parallel.remat import checkpoint_policy, rematerialize
from ernie_jax.sharding import make_mesh, one_device_mesh
from ernie_jax.testing import loss_and_gradients, multimodal_rows, random_batch, tiny_moe, tiny_vl, worst_difference
from ernie_jax.testing.gradients import initial_state

TEXT, VL = tiny_moe(num_hidden_layers=3), tiny_vl(num_key_value_heads=4)
WEIGHTS = RouterLossWeights(aux=0.1, z=0.01, orthogonal=0.1, vision=0.5)
MESHES = {"one device": {}, "data 1 x tensor 2 x expert 2": {"tensor": 2, "expert": 2}}


@functools.cache
def evaluate(config, mesh, policy, attention="dense"):
    sizes = MESHES[mesh]
    where = make_mesh(**sizes, devices=jax.devices()[:4]) if sizes else one_device_mesh()
    compute = ComputeConfig(remat=policy, attention=attention, attention_chunk=4)
    if config.vision is None:
        return loss_and_gradients(config, random_batch(config, 8, 12), where, compute=compute)
    batch = multimodal_rows(config).batch(where.shape["expert"], where.shape["tensor"], max_patches=160 if sizes else 448)
    return loss_and_gradients(config, batch, where, compute=compute, weights=WEIGHTS)


def check(config, mesh, policy, attention="dense"):
    want, got = evaluate(config, mesh, "none", attention), evaluate(config, mesh, policy, attention)
    np.testing.assert_allclose(got.loss, want.loss, rtol=1e-6)
    difference, path = worst_difference(want, got)
    assert difference < 1e-5, path


@pytest.mark.parametrize("policy", ["attention", ("qkv", "expert_in")], ids=str)
def test_text_gradients_are_those_of_none(policy):
    check(TEXT, "data 1 x tensor 2 x expert 2", policy)


def test_text_gradients_on_one_device():
    check(TEXT, "one device", "attention=full,exchange=full")


def test_multimodal_gradients_are_those_of_none():
    check(VL, "data 1 x tensor 2 x expert 2", "full")


def test_multimodal_gradients_on_one_device():
    check(VL, "one device", "vision")


def test_with_attention_by_tiles():
    check(TEXT, "one device", "experts", "chunked")


def residual_shapes(policy, attention):
    """Shapes with the leading axis of two scanned MoE layers, of floats that wait for the backward pass and are no variables."""
    config = tiny_moe(num_hidden_layers=3, hidden_size=40, head_dim=12)
    compute = ComputeConfig(remat=policy, attention=attention, attention_chunk=4)
    graphdef, state = nnx.split(abstract_model(config, compute, None))
    params, rest = nnx.split_state(initial_state(config, 0), nnx.Param, ...)
    ones = jnp.ones((3, 7), jnp.int32)
    weights = {x.shape for x in jax.tree.leaves(state)}

    def loss(params):
        model = nnx.merge(graphdef, params, rest)
        return jnp.sum(model.hidden(TextInputs(ones, ones, jnp.cumsum(ones, 1) - 1))[0])

    pullback = jax.eval_shape(lambda p: jax.vjp(loss, p)[1], params)
    leaves = [x for x in jax.tree.leaves(pullback) if x.shape[:1] == (2,) and x.ndim > 1 and jnp.issubdtype(x.dtype, jnp.floating)]
    return sorted(x.shape[1:] for x in leaves if x.shape not in weights)


# B 3, T 7, D 40, 4 query and 2 kv heads of 12, 8 experts of width 16, 3 chosen; the shared expert has width 16.
INPUT = [(3, 7, 40)]
QKV, OUT, RESIDUAL, SHARED = [(3, 7, 4, 12), (3, 7, 2, 12), (3, 7, 2, 12)], [(3, 7, 4, 12)], [(3, 7, 40)], [(3, 7, 2, 16)]
LOG_SUM, ROUTER, GATE_UP = [(2, 3, 2, 2, 4)], [(3, 7, 8)], [(63, 32)]


@pytest.mark.parametrize(
    ("policy", "attention", "kept"),
    [
        ("full", "dense", INPUT),
        ("attention", "dense", INPUT + RESIDUAL + SHARED + ROUTER + GATE_UP),
        ("experts", "dense", INPUT + QKV + OUT + RESIDUAL + SHARED + ROUTER),
        ("experts", "chunked", INPUT + QKV + OUT + LOG_SUM + RESIDUAL + SHARED + ROUTER),
        ("mlp=full", "chunked", INPUT + QKV + OUT + LOG_SUM + RESIDUAL + ROUTER + GATE_UP),
        (("qkv",), "dense", INPUT + QKV),
    ],
    ids=str,
)
def test_what_waits_for_the_backward_pass_is_what_the_table_says(policy, attention, kept):
    assert residual_shapes(policy, attention) == sorted(kept)


def test_offloading_where_there_is_no_host_memory_is_an_error():
    with pytest.raises(ValueError, match="host memory, which the backend 'cpu' does not have"):
        rematerialize(lambda x: x, "offload")


def test_offloaded_tensors_go_to_the_host_and_back():
    """Lowered for a TPU, since on CPU nothing is moved."""
    body = jax.checkpoint(
        lambda x, w: (jnp.sin(jax.ad_checkpoint.checkpoint_name(x @ w, "qkv")), None),
        policy=checkpoint_policy(remat_plan("offload")),
    )
    step = jax.jit(jax.grad(lambda ws, x: jax.lax.scan(body, x, ws)[0].sum()))
    text = step.trace(jnp.ones((3, 8, 8)), jnp.ones((4, 8))).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("pinned_host") == 1 and "annotate_device_placement" in text
