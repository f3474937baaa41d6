"""Gradients summed over data shards in 8 bits or sparsely: against the plain sum, what is held back, how far the loss falls."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from ernie_jax.sharding import make_mesh
from ernie_jax.testing import collectives, tiny_moe
from ernie_jax.train.compressed_gradients import make_compressed_gradients
from ernie_jax.train.gradients import make_gradients
from ernie_jax.train.state import new_state, run_layout
from ernie_jax.train.step import make_train_step

MODEL = tiny_moe(num_hidden_layers=1, layer_start=0, num_experts_per_tok=2)
MOE = {"aux_loss_coef": 0.02, "z_loss_coef": 0.01, "orthogonal_coef": 0.01}
DATA = 4


@pytest.fixture(scope="module")
def made(tiny_run, layout_of, fresh_state):
    """`made(compression, ...)`: (run, layout, fresh state)."""

    def make(compression, fraction=0.3, **changes):
        optimizer = {"gradient_compression": compression, "gradient_fraction": fraction} | changes.pop("optimizer", {})
        schedule = {"peak": 3e-3, "minimum": 3e-3, "kind": "constant"}
        sections = {"moe": MOE, "optimizer": optimizer, "schedule": schedule, "mesh": {"data": DATA} | changes.pop("mesh", {})}
        run = tiny_run(model=MODEL, **sections, **changes)
        layout = layout_of(run, data=DATA)
        state = fresh_state(tiny_run(model=MODEL), layout)
        new = jax.jit(lambda p, b: [getattr(new_state(run, p, b, layout), name) for name in ("held", "loss_scale")])
        held, scale = jax.device_get(new(state.params, state.biases))
        return run, layout, replace(state, held=held, loss_scale=scale)

    return make


@pytest.fixture(scope="module")
def compiled(made, batch_of):
    """`compiled(compression)`: (run, fresh state, compiled step), each compiled once."""
    known = {}

    def compile_once(compression):
        if compression not in known:
            run, layout, state = made(compression)
            step = make_train_step(run, layout).lower(state, batch_of(run)).compile()
            known[compression] = run, jax.device_get(state), step
        run, state, step = known[compression]
        # A step takes the buffers of its state, so each test has its own.
        return run, jax.device_put(state, step.input_shardings[0][0], may_alias=False), step

    return compile_once


def relative(got, want):
    return np.linalg.norm(np.asarray(got) - want) / max(np.linalg.norm(want), 1e-12)


def test_everything_sent_is_the_plain_gradient(made, batch_of, assert_close):
    """`sparse` with all elements: shards are one more way to split a step, for loss, statistics and every gradient.

    A loss scale is gone from what is summed and held back.
    """
    run, layout, state = made("none", accumulate=2)
    want = jax.jit(make_gradients(run, layout))(state, batch_of(run))
    run, layout, state = made("sparse", fraction=1.0, accumulate=2, optimizer={"loss_scale": 4096.0})
    *got, held = jax.jit(make_compressed_gradients(run, layout))(state, batch_of(run))
    assert_close(tuple(got), want, rtol=2e-5, atol=2e-6)
    assert all(not np.asarray(h.of_array).any() for h in held.values() if h is not None)
    small = {path for path, h in held.items() if h is None}
    assert small and all(np.asarray(want[0][path]).size < 1024 for path in small)


def test_rounded_sums_are_near_and_the_rest_is_held(made, batch_of):
    run, layout, state = made("none")
    want = jax.jit(make_gradients(run, layout))(state, batch_of(run))[0]
    run, layout, state = made("int8", mesh={"zero": 1})
    got, _, _, held = jax.jit(make_compressed_gradients(run, layout))(state, batch_of(run))
    for path, gradient in got.items():
        if held[path] is None:
            assert relative(gradient, want[path]) < 1e-5
            continue
        assert 1e-4 < relative(gradient, want[path]) < 0.02, path
        left = np.asarray(held[path].of_array).sum(0) + np.asarray(held[path].of_sum).reshape(-1)[: want[path].size]
        assert relative(np.asarray(gradient).ravel() + left, np.asarray(want[path]).ravel()) < 1e-5, path


def test_bytes_of_the_step(compiled):
    """Of the gradients of more than 1,024 elements no float is summed over devices, and each is received twice in 8 bits."""
    _, state, step = compiled("int8")
    found = collectives(step.as_text())
    sizes = [h.of_array.shape[-1] for h in state.held.values() if h is not None]
    padded = sum(-(-size // (128 * DATA)) * 128 * DATA for size in sizes)
    for kind in ("all-to-all", "all-gather"):
        assert sum(c.bytes for c in found if c.kind == kind and "compressed_sum" in c.name) == padded * 132 // 128
    assert max((np.prod(s) for c in found if c.kind == "all-reduce" for s in c.shapes), default=0) < 1024


def test_the_loss_falls_as_far(compiled, batch_of):
    losses = {}
    for name in ("none", "int8", "sparse"):
        run, state, step = compiled(name)
        batches = [jax.device_put(batch_of(run, seed), step.input_shardings[0][1]) for seed in range(4)]
        found = []
        for i in range(60):
            state, metrics = step(state, batches[i % 4])
            found.append(metrics["loss"])
        losses[name] = np.asarray(jax.device_get(found))
    plain = losses["none"]
    assert plain[-4:].mean() < 0.6 * plain[:4].mean()
    # Of a third of the elements what is left waits for a few steps, which shows in sixty.
    for name, near in (("int8", 0.02), ("sparse", 0.05)):
        assert not np.array_equal(plain, losses[name])
        assert losses[name][-4:].mean() == pytest.approx(plain[-4:].mean(), rel=near), name


def test_a_step_that_does_not_count_leaves_what_is_held(compiled, batch_of):
    run, state, step = compiled("int8")
    held = jax.tree.map(lambda a: np.full(a.shape, 0.25, a.dtype), state.held)
    broken = jax.tree.map(lambda a: a * np.nan, state.params)
    inputs = jax.device_put((replace(state, params=broken, held=held), batch_of(run)), step.input_shardings[0])
    after, metrics = step(*inputs)
    assert metrics["skipped"] == 1
    for left in jax.tree.leaves(after.held):
        np.testing.assert_array_equal(left, 0.25)


def test_refusals(tiny_run):
    with pytest.raises(ValueError, match=r"mesh of the data axis alone.*here there is config\.mesh\.expert=2"):
        tiny_run(optimizer={"gradient_compression": "int8"}, mesh={"data": 2, "expert": 2})
    with pytest.raises(ValueError, match=r"here there is config\.mesh\.pipeline=2"):
        tiny_run(optimizer={"gradient_compression": "sparse"}, mesh={"data": 2, "pipeline": 2})
    with pytest.raises(ValueError, match=r"here there is config\.mesh\.zero=3"):
        tiny_run(optimizer={"gradient_compression": "fp8"}, mesh={"data": 2, "zero": 3})
    with pytest.raises(ValueError, match=r"gradient_compression='int4'; expected one of"):
        tiny_run(optimizer={"gradient_compression": "int4"})
    with pytest.raises(ValueError, match=r"gradient_fraction=0; expected a number above 0"):
        tiny_run(optimizer={"gradient_fraction": 0})
    # A mesh that takes what devices there are is known only then.
    run = tiny_run(optimizer={"gradient_compression": "int8"}, mesh={"data": -1})
    layout = run_layout(run, make_mesh(data=2, expert=2, devices=jax.devices()[:4]))
    with pytest.raises(ValueError, match=r"the mesh has \{'expert': 2\}"):
        make_compressed_gradients(run, layout)
