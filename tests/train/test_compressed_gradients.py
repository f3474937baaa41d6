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


@pytest.fixture
def made(tiny_run, layout_of, fresh_state, batch_of):
    """`made(compression, ...)`: (run, layout, fresh state)."""

    def make(compression, fraction=0.1, **changes):
        optimizer = {"gradient_compression": compression, "gradient_fraction": fraction} | changes.pop("optimizer", {})
        run = tiny_run(model=MODEL, moe=MOE, optimizer=optimizer, mesh={"data": DATA} | changes.pop("mesh", {}), **changes)
        layout = layout_of(run, data=DATA)
        state = fresh_state(tiny_run(model=MODEL), layout)
        if compression == "none":
            return run, layout, state
        with_held = jax.device_get(jax.jit(lambda p, b: new_state(run, p, b, DATA).held)(state.params, state.biases))
        return run, layout, replace(state, held=with_held)

    return make


def relative(got, want):
    return np.linalg.norm(np.asarray(got) - want) / max(np.linalg.norm(want), 1e-12)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_everything_sent_is_the_plain_gradient(accumulate, made, batch_of, assert_close):
    """`sparse` with all elements: shards are one more way to split a step, for loss, statistics and every gradient."""
    run, layout, state = made("none", accumulate=accumulate)
    want = jax.jit(make_gradients(run, layout))(state, batch_of(run))
    run, layout, state = made("sparse", fraction=1.0, accumulate=accumulate)
    *got, held = jax.jit(make_compressed_gradients(run, layout))(state, batch_of(run))
    assert_close(tuple(got), want, rtol=2e-5, atol=2e-6)
    assert all(not np.asarray(h.of_array).any() for h in held.values() if h is not None)
    small = {path for path, h in held.items() if h is None}
    assert small and all(np.asarray(want[0][path]).size < 1024 for path in small)


@pytest.mark.parametrize(("name", "least", "most"), [("int8", 1e-4, 0.02), ("fp8", 1e-3, 0.06)])
def test_rounded_sums_are_near_and_the_rest_is_held(name, least, most, made, batch_of):
    run, layout, state = made("none")
    want = jax.jit(make_gradients(run, layout))(state, batch_of(run))[0]
    run, layout, state = made(name, mesh={"zero": 1})
    got, _, _, held = jax.jit(make_compressed_gradients(run, layout))(state, batch_of(run))
    for path, gradient in got.items():
        if held[path] is None:
            assert relative(gradient, want[path]) < 1e-5
            continue
        assert least < relative(gradient, want[path]) < most, path
        left = np.asarray(held[path].of_array).sum(0) + np.asarray(held[path].of_sum).reshape(-1)[: want[path].size]
        assert relative(np.asarray(gradient).ravel() + left, np.asarray(want[path]).ravel()) < 1e-5, path


def test_bytes_of_the_step(made, batch_of):
    """Of the gradients of more than 1,024 elements no float is summed over devices, and each is received twice in 8 bits."""
    run, layout, state = made("int8")
    found = collectives(make_train_step(run, layout).lower(state, batch_of(run)).compile().as_text())
    sizes = [h.of_array.shape[-1] for h in state.held.values() if h is not None]
    padded = sum(-(-size // (128 * DATA)) * 128 * DATA for size in sizes)
    for kind in ("all-to-all", "all-gather"):
        assert sum(c.bytes for c in found if c.kind == kind and "compressed_sum" in c.name) == padded * 132 // 128
    assert max((np.prod(s) for c in found if c.kind == "all-reduce" for s in c.shapes), default=0) < 1024


@pytest.fixture
def losses(made, batch_of):
    def train(compression, **changes):
        schedule = {"peak": 3e-3, "minimum": 3e-3, "kind": "constant"}
        run, layout, state = made(compression, schedule=schedule, **changes)
        step, found = make_train_step(run, layout), []
        for i in range(60):
            state, metrics = step(state, batch_of(run, i % 4))
            found.append(metrics["loss"])
        return np.asarray(jax.device_get(found))

    return train


def test_the_loss_falls_as_far(losses):
    plain = losses("none")
    assert plain[-4:].mean() < 0.6 * plain[:4].mean()
    for name, near in (("int8", 0.02), ("fp8", 0.02), ("sparse", 0.05)):
        # Of a third of the elements what is left waits for a few steps, which shows in sixty.
        rounded = losses(name, fraction=0.3)
        assert not np.array_equal(plain, rounded)
        assert rounded[-4:].mean() == pytest.approx(plain[-4:].mean(), rel=near), name


def test_a_step_that_does_not_count_leaves_what_is_held(made, batch_of):
    run, layout, state = made("int8")
    held = jax.tree.map(lambda a: np.full(a.shape, 0.25, a.dtype), state.held)
    broken = jax.tree.map(lambda a: a * np.nan, state.params)
    after, metrics = make_train_step(run, layout)(replace(state, params=broken, held=held), batch_of(run))
    assert metrics["skipped"] == 1
    for left in jax.tree.leaves(after.held):
        np.testing.assert_array_equal(left, 0.25)


def test_refusals(tiny_run):
    with pytest.raises(ValueError, match=r"mesh of the data axis alone.*here there is config\.mesh\.expert=2"):
        tiny_run(optimizer={"gradient_compression": "int8"}, mesh={"data": 2, "expert": 2})
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
