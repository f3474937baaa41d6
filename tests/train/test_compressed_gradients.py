"""Gradients summed over data shards in 8 bits or sparsely: against the plain sum, what is held back, how far the loss falls."""

import dataclasses
import io
import itertools
from dataclasses import replace

import grain
import jax
import numpy as np
import pytest

from ernie_jax.config.run import MeshConfig
from ernie_jax.data import TrainIterator
from ernie_jax.sharding import make_mesh, variables_by_path
from ernie_jax.testing import collectives, tiny_moe, tiny_vl
from ernie_jax.train.compressed_gradients import make_compressed_gradients
from ernie_jax.train.gradients import make_gradients
from ernie_jax.train.hooks import Moment
from ernie_jax.train.resume import RunCheckpoints
from ernie_jax.train.state import new_state, run_layout, state_shardings
from ernie_jax.train.step import make_train_step

MODEL = tiny_moe(num_hidden_layers=1, layer_start=0, num_experts_per_tok=2)
MOE = {"aux_loss_coef": 0.02, "z_loss_coef": 0.01, "orthogonal_coef": 0.01}
DATA = 4
MESHES = {"data": {}, "expert": {"data": 2, "expert": 2, "zero": 1}}


@pytest.fixture(scope="module")
def made(tiny_run, layout_of, fresh_state):
    """`made(compression, ...)`: (run, layout, fresh state)."""

    def make(compression, fraction=0.3, **changes):
        optimizer = {"gradient_compression": compression, "gradient_fraction": fraction} | changes.pop("optimizer", {})
        schedule = {"peak": 3e-3, "minimum": 3e-3, "kind": "constant"}
        sections = {"moe": MOE, "optimizer": optimizer, "schedule": schedule, "mesh": {"data": DATA} | changes.pop("mesh", {})}
        run = tiny_run(model=MODEL, **sections, **changes)
        layout = layout_of(run, **{axis: size for axis, size in dataclasses.asdict(run.mesh).items() if axis != "zero"})
        state = fresh_state(tiny_run(model=MODEL, mesh={"zero": run.mesh.zero}), layout)
        new = jax.jit(lambda p, b: [getattr(new_state(run, p, b, layout), name) for name in ("held", "loss_scale")])
        held, scale = jax.device_get(new(state.params, state.biases))
        return run, layout, jax.device_put(replace(state, held=held, loss_scale=scale), state_shardings(run, layout))

    return make


@pytest.fixture(scope="module")
def compiled(made, batch_of):
    """`compiled(compression, mesh)`: (run, fresh state, compiled step), each compiled once."""
    known = {}

    def compile_once(compression, mesh="data"):
        key = compression, mesh
        if key not in known:
            run, layout, state = made(compression, mesh=MESHES[mesh])
            step = make_train_step(run, layout).lower(state, batch_of(run)).compile()
            known[key] = run, jax.device_get(state), step
        run, state, step = known[key]
        # A step takes the buffers of its state, so each test has its own.
        return run, jax.device_put(state, step.input_shardings[0][0], may_alias=False), step

    return compile_once


def relative(got, want):
    return np.linalg.norm(np.asarray(got) - want) / max(np.linalg.norm(want), 1e-12)


def left_of(held):
    """What all devices together hold back of a gradient: its pieces are each the parts of all shards one after the other."""
    left = np.asarray(held.of_array).sum(0)
    of_sum = np.asarray(held.of_sum)
    pieces = of_sum.shape[1:-1]
    size = [n // p for n, p in zip(left.shape, pieces, strict=True)]
    for place in itertools.product(*map(range, pieces)):
        block = tuple(slice(i * n, (i + 1) * n) for i, n in zip(place, size, strict=True))
        left[block] += of_sum[(slice(None), *place)].reshape(-1)[: np.prod(size)].reshape(size)
    return left


def assert_rounded(got, want, held):
    """Gradients are near the plain ones, and with what is held back they are these."""
    for path, gradient in got.items():
        if held[path] is None:
            assert relative(gradient, want[path]) < 1e-5
            continue
        assert 1e-4 < relative(gradient, want[path]) < 0.02, path
        assert relative(np.asarray(gradient) + left_of(held[path]), want[path]) < 1e-5, path


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
    assert_rounded(got, want, held)


def test_bytes_of_the_step(compiled):
    """Of the gradients of more than 1,024 elements no float is summed over devices, and each is received twice in 8 bits."""
    _, state, step = compiled("int8")
    found = collectives(step.as_text())
    sizes = [h.of_array[0].size for h in state.held.values() if h is not None]
    padded = sum(-(-size // (128 * DATA)) * 128 * DATA for size in sizes)
    for kind in ("all-to-all", "all-gather"):
        assert sum(c.bytes for c in found if c.kind == kind and "compressed_sum" in c.name) == padded * 132 // 128
    assert max((np.prod(s) for c in found if c.kind == "all-reduce" for s in c.shapes), default=0) < 1024


def test_the_loss_falls_as_far(compiled, batch_of):
    losses = {}
    for name, mesh in (("none", "data"), ("int8", "data"), ("sparse", "data"), ("int8", "expert")):
        run, state, step = compiled(name, mesh)
        batches = [jax.device_put(batch_of(run, seed), step.input_shardings[0][1]) for seed in range(4)]
        found = []
        for i in range(60):
            state, metrics = step(state, batches[i % 4])
            found.append(metrics["loss"])
        losses[name, mesh] = np.asarray(jax.device_get(found))
    plain = losses.pop(("none", "data"))
    assert plain[-4:].mean() < 0.6 * plain[:4].mean()
    # Of a third of the elements what is left waits for a few steps, which shows in sixty.
    for key, near in zip(losses, (0.02, 0.05, 0.02), strict=True):
        assert not np.array_equal(plain, losses[key])
        assert losses[key][-4:].mean() == pytest.approx(plain[-4:].mean(), rel=near), key


@pytest.mark.parametrize("others", [{"expert": 2}, {"expert": 2, "tensor": 2}], ids=str)
def test_everything_sent_beside_other_axes(others, made, batch_of, assert_close):
    """The shards score 41 and 8 tokens, and every gradient keeps the layout of its parameter."""
    run, layout, state = made("none", accumulate=2)
    batch = batch_of(run)
    batch["labels"] = np.where(np.arange(8)[:, None] >= 4, np.where(np.arange(12) % 6, -100, batch["labels"]), batch["labels"])
    want = jax.jit(make_gradients(run, layout))(state, batch)
    run, layout, state = made("sparse", fraction=1.0, accumulate=2, mesh={"data": 2, **others})
    *got, held = jax.jit(make_compressed_gradients(run, layout))(state, batch)
    assert_close(tuple(got), want, rtol=2e-5, atol=2e-6)
    for path, variable in variables_by_path(state.params).items():
        gradient = got[0][path]
        assert gradient.sharding.is_equivalent_to(variable.get_value().sharding, gradient.ndim), path
    split = [h.of_array for h in held.values() if h is not None and len(h.of_array.sharding.spec) > 1]
    assert split and all(array.addressable_data(0).size < array[0].size for array in split)
    assert not any(np.asarray(h.of_array).any() for h in held.values() if h is not None)


def test_a_step_beside_an_expert_axis(made, compiled, batch_of):
    """Rounded gradients as the first moments have them, what is held back, and bytes."""
    run, layout, plain = made("none")
    want, *_ = jax.jit(make_gradients(run, layout))(plain, batch_of(run))
    run, state, step = compiled("int8", "expert")
    shards = run.mesh.data
    held = {path: h for path, h in state.held.items() if h is not None}
    sizes = [h.of_array[0].size // np.prod(h.of_sum.shape[1:-1]) for h in held.values()]
    assert sorted(sizes) != sorted(h.of_array[0].size for h in held.values()), "experts are split"
    found = collectives(step.as_text())
    sums = [c for c in found if "compressed_sum" in c.name]
    padded = sum(-(-size // (128 * shards)) * 128 * shards for size in sizes)
    for kind in ("all-to-all", "all-gather"):
        assert sum(c.bytes for c in sums if c.kind == kind) == padded * 132 // 128
    # Devices of one data shard are d and d + 1 for even d: whoever adds up more than 1,024 floats is of one of these pairs.
    pairs = ((0, 1), (2, 3))
    large = [c for c in found if c.kind in ("all-reduce", "reduce-scatter") and any(np.prod(s) >= 1024 for s in c.shapes)]
    assert large and all(c.groups == pairs or all(len(group) == 1 for group in c.groups) for c in large)
    assert {c.groups for c in sums if c.kind == "all-to-all"} == {((0, 2), (1, 3))}

    after, metrics = step(state, jax.device_put(batch_of(run), step.input_shardings[0][1]))
    clip = min(1.0, 1.0 / float(metrics["grad_norm"]))
    got = {path: np.asarray(mu) / (1 - run.optimizer.b1) / clip for path, mu in after.opt_state.mu.items()}
    assert_rounded(got, want, after.held)


def test_a_run_resumes_on_the_same_mesh_alone(compiled, layout_of, batch_of, tmp_path):
    run, state, step = compiled("int8", "expert")
    after, _ = step(state, jax.device_put(batch_of(run), step.input_shardings[0][1]))

    def resumed(mesh):
        other = replace(run, mesh=MeshConfig(**mesh))
        sizes = {axis: size for axis, size in mesh.items() if axis != "zero"}
        with RunCheckpoints(other, tmp_path, print) as checkpoints:
            return checkpoints.resume(layout_of(other, **sizes), batches)

    rows = grain.MapDataset.range(8).map(lambda i: {"skipped": np.int64(0), "row": i})
    with TrainIterator(iter(rows.to_iter_dataset()), io.BytesIO(), {"files": {"digest": ""}}) as batches:
        with RunCheckpoints(run, tmp_path, print) as checkpoints:
            checkpoints.save(Moment(1, after, batches))
        again = resumed(MESHES["expert"])
        for got, want in zip(jax.tree.leaves(again), jax.tree.leaves(after), strict=True):
            np.testing.assert_array_equal(got, want)
            assert got.sharding == want.sharding
        assert any(np.asarray(leaf).any() for leaf in jax.tree.leaves(again.held))
        for mesh in ({"data": 4}, {"data": 2, "tensor": 2}, {"data": 2}):
            sizes = "data={data}, expert=1, tensor={tensor}".format(**{"tensor": 1} | mesh)
            with pytest.raises(ValueError, match=rf"another mesh than the one here \({sizes}\): held/.*resume with the data,"):
                resumed(mesh)


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
    with pytest.raises(ValueError, match=r"mesh of data, expert and tensor axes.*here there is config\.mesh\.pipeline=2"):
        tiny_run(optimizer={"gradient_compression": "sparse"}, mesh={"data": 2, "pipeline": 2})
    with pytest.raises(ValueError, match=r"here there is config\.mesh\.zero=3"):
        tiny_run(optimizer={"gradient_compression": "fp8"}, mesh={"data": 2, "zero": 3})
    with pytest.raises(ValueError, match=r"here there is a vision-language model"):
        tiny_run(model=tiny_vl(), seq_len=24, optimizer={"gradient_compression": "int8"})
    with pytest.raises(ValueError, match=r"gradient_compression='int4'; expected one of"):
        tiny_run(optimizer={"gradient_compression": "int4"})
    with pytest.raises(ValueError, match=r"gradient_fraction=0; expected a number above 0"):
        tiny_run(optimizer={"gradient_fraction": 0})
    # A mesh that takes what devices there are is known only then.
    run = tiny_run(optimizer={"gradient_compression": "int8"}, mesh={"data": -1})
    layout = run_layout(run, make_mesh(data=2, pipeline=2, devices=jax.devices()[:4]))
    with pytest.raises(ValueError, match=r"the mesh has pipeline=2"):
        make_compressed_gradients(run, layout)
