import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ernie_jax.config.optimization import OptimizerConfig
from ernie_jax.sharding import make_mesh
from ernie_jax.train.optimizer import decay_mask, is_gate, make_adamw, orthogonal_step


def test_decay_leaves_out_norms_and_biases_only():
    paths = [
        "embed/embedding",
        "norm/scale",
        "decoder/segments/0/layers/0/input_norm/scale",
        "decoder/segments/0/layers/0/post_attention_norm/scale",
        "decoder/segments/0/layers/0/attention/q_proj",
        "decoder/segments/1/layers/0/moe/router/gate",
        "decoder/segments/1/layers/0/moe/experts/down",
        "vision/merger/bias",
    ]
    mask = decay_mask(paths, OptimizerConfig().decay_exclude)
    assert [path for path in paths if not mask[path]] == [paths[1], paths[2], paths[3], paths[7]]


@pytest.mark.parametrize("alone", [False, True], ids=["expression", "kernel"])
def test_adamw_equals_its_formula_over_three_updates(alone):
    rng = np.random.default_rng(0)
    config = OptimizerConfig(weight_decay=0.1, clip_norm=1.0)
    # The last is several pieces of a kernel's work, and a rest.
    shapes = {"a/kernel": (3, 2), "a_norm/scale": (2,), "b/kernel": (257, 311)}
    values = {path: rng.normal(size=shape) for path, shape in shapes.items()}
    got = {path: jnp.asarray(v, jnp.float32) for path, v in values.items()}
    transform = make_adamw(config, list(values), alone=alone)
    state = transform.init(got)
    first = {path: np.zeros_like(v) for path, v in values.items()}
    second = {path: np.zeros_like(v) for path, v in values.items()}
    for t, rate in enumerate((0.0, 0.1, 0.05), 1):
        grads = {path: 2 * rng.normal(size=v.shape) for path, v in values.items()}
        got, state = transform.update({p: jnp.asarray(g, jnp.float32) for p, g in grads.items()}, state, got, jnp.float32(rate))
        scale = min(1.0, 1.0 / np.sqrt(sum(np.square(g).sum() for g in grads.values())))
        for path, value in values.items():
            g = grads[path] * scale
            first[path] = 0.9 * first[path] + 0.1 * g
            second[path] = 0.95 * second[path] + 0.05 * g * g
            step = (first[path] / (1 - 0.9**t)) / (np.sqrt(second[path] / (1 - 0.95**t)) + 1e-8)
            decay = 0.1 * value if path.endswith("kernel") else 0.0
            values[path] = value - rate * (step + decay)
            # Among many numbers some come near zero.
            atol = 1e-6 if path == "b/kernel" else 0.0
            np.testing.assert_allclose(got[path], values[path], rtol=2e-5, atol=atol, err_msg=path)


def test_the_norm_that_clips_is_global_over_shards_and_groups():
    # Case 13: squared norms 20 and 100 on two shards give 10.954, not the mean of two local norms, 7.236.
    expert_grads = np.array([[4.0, 2.0, 0.0], [6.0, 8.0, 0.0]], np.float32)
    mesh = make_mesh(data=4, expert=2)
    sharded = jax.device_put(expert_grads, NamedSharding(mesh, PartitionSpec("expert")))
    transform = make_adamw(OptimizerConfig(clip_norm=1.0), ["experts/down", "dense/kernel"])
    grads = {"experts/down": sharded, "dense/kernel": jax.device_put(jnp.zeros(2), NamedSharding(mesh, PartitionSpec()))}
    _, state = jax.jit(transform.update)(grads, transform.init(grads), grads, 0.1)
    np.testing.assert_allclose(state.mu["experts/down"] / 0.1, expert_grads / 10.954451, rtol=1e-5)
    # A second parameter group with squared norm 24 counts into the same norm, which becomes 12.
    grads["dense/kernel"] = jax.device_put(jnp.sqrt(jnp.full(2, 12.0)), NamedSharding(mesh, PartitionSpec()))
    _, state = jax.jit(transform.update)(grads, transform.init(grads), grads, 0.1)
    np.testing.assert_allclose(state.mu["experts/down"] / 0.1, expert_grads / 12.0, rtol=1e-5)


@pytest.mark.parametrize("alone", [False, True], ids=["expression", "kernel"])
def test_an_update_needs_no_copies_and_a_skipped_one_changes_nothing(alone):
    values = {path: jnp.ones((256, 1024)) for path in ("a/kernel", "b/kernel")}
    adam = make_adamw(OptimizerConfig(), list(values), alone=alone)
    # Donated buffers are taken in the order of the results: values, then state.
    update = jax.jit(lambda g, v, s, rate, finite: adam.update(g, s, v, rate, finite), donate_argnums=(1, 2))
    args = (values, values, adam.init(values), jnp.float32(0.1), jnp.bool_(True))
    # The moments and values are overwritten where they are: one buffer more would be 1 MiB.
    assert update.lower(*args).compile().memory_analysis().temp_size_in_bytes < 2**16
    bad = {path: v.at[0, 0].set(jnp.nan) for path, v in values.items()}
    state = adam.update(values, adam.init(values), values, jnp.float32(0.1))[1]
    kept, after = jax.jit(adam.update)(bad, state, values, jnp.float32(0.1), jnp.bool_(False))
    for a, b in zip(jax.tree.leaves((kept, after)), jax.tree.leaves((values, state)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("groups", [1, 2])
def test_orthogonal_steps_make_the_rows_orthogonal_and_touch_nothing_else(groups):
    gate = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 32)), jnp.float32)
    values = {"decoder/x/router/gate": gate, "decoder/x/experts/down": gate}
    step = jax.jit(lambda v: orthogonal_step(v, 300.0 / groups, groups))

    def distance(w):
        w = np.asarray(w, np.float64)
        w = (w / np.linalg.norm(w, axis=-1, keepdims=True)).reshape(2, groups, 8 // groups, 32)
        return np.square(w @ np.swapaxes(w, -1, -2) - np.eye(8 // groups)).sum()

    distances = [distance(gate)]
    for _ in range(5):
        values = step(values)
        distances.append(distance(values["decoder/x/router/gate"]))
    assert distances == sorted(distances, reverse=True)
    assert distances[0] > 1 and distances[-1] < 1e-4
    np.testing.assert_array_equal(values["decoder/x/experts/down"], gate)


def test_groups_are_for_the_text_gate_alone():
    gate = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 32)), jnp.float32)
    text, vision = "decoder/x/router/gate", "decoder/x/vision_router/gate"
    grouped, whole = (orthogonal_step({text: gate, vision: gate}, 10.0, groups) for groups in (4, 1))
    np.testing.assert_array_equal(grouped[vision], whole[vision])
    assert np.abs(grouped[text] - whole[text]).max() > 1e-3


def test_gates_are_found_by_path():
    assert is_gate("decoder/segments/1/layers/0/moe/router/gate")
    assert is_gate("decoder/segments/1/layers/0/moe/vision_router/gate")
    assert not is_gate("decoder/segments/1/layers/0/moe/experts/gate_up")
