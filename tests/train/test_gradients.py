"""Accumulation, masking and the router losses, each against a value computed another way."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ernie_jax.nn.dtypes import DtypePolicy
from ernie_jax.objectives import chunked_cross_entropy
from ernie_jax.testing import tiny_moe
from ernie_jax.train.gradients import make_gradients, split_microbatches
from ernie_jax.train.step import make_train_step, model_of

LAYER = tiny_moe(num_hidden_layers=1, layer_start=0, num_experts_per_tok=2)
GATE = "decoder/segments/0/layers/0/moe/router/gate"


@pytest.fixture(scope="module")
def gradients_of(layout_of, fresh_state):
    """(gradients by path, total, parts) on the host for a run, a batch and mesh sizes."""

    def compute(run, batch, **mesh):
        layout = layout_of(run, **mesh)
        return jax.device_get(jax.jit(make_gradients(run, layout))(fresh_state(run, layout), batch))

    return compute


def unscored(batch):
    return batch | {"labels": np.full_like(batch["labels"], -100)}


def token_losses_of(run, layout, state, batch):
    """[B, T] cross-entropy by NumPy from the model's logits, 0 where not scored."""
    model = model_of(run, layout, state)
    out = model(batch["input_ids"], segment_ids=batch["segment_ids"], position_ids=batch["position_ids"])
    logits = np.asarray(out.logits, np.float64)
    log_z = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    chosen = np.take_along_axis(logits, np.maximum(batch["labels"], 0)[..., None], -1)[..., 0]
    return np.where(batch["labels"] >= 0, log_z - chosen, 0.0)


def test_microbatches_take_every_nth_row():
    parts = split_microbatches({"x": jnp.arange(12).reshape(6, 2)}, 3)["x"]
    np.testing.assert_array_equal(parts[:, :, 0] // 2, [[0, 3], [1, 4], [2, 5]])


def test_losses_of_unequal_microbatches_are_weighted_by_tokens():
    # Case 31: losses {4} and {1, 1, 1} are 7 / 4 = 1.75, not the mean of the means, 2.5.
    loss = np.array([[4.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    labels = jnp.array([[1, -100, -100], [1, 1, 1]])
    # Logits (a, 0) with label 1 cost log(1 + e^a).
    hidden = jnp.asarray(np.log(np.expm1(np.maximum(loss, 1e-3)))[..., None], jnp.float32)
    kernel = jnp.array([[1.0], [0.0]])
    parts = [chunked_cross_entropy(hidden[i : i + 1], kernel, labels[i : i + 1], DtypePolicy(), chunk=2) for i in range(2)]
    assert float(sum(p[0] for p in parts) / (labels >= 0).sum()) == pytest.approx(1.75, rel=1e-5)


def test_accumulated_loss_is_the_token_mean_of_the_whole_batch(
    tiny_run, layout_of, fresh_state, batch_of, gradients_of, assert_close
):
    # Case 32: a microbatch without one scored token neither shrinks nor poisons the step.
    run = tiny_run(model=LAYER, batch_size=4)
    batch = batch_of(run)
    batch["labels"][1::2] = -100
    batch["labels"][2, 3:] = -100
    layout = layout_of(run)
    losses = token_losses_of(run, layout, fresh_state(run, layout), batch)
    whole = gradients_of(run, batch)
    halves = gradients_of(dataclasses.replace(run, accumulate=2), batch, data=2)
    assert whole[2].loss == pytest.approx(losses.sum() / (batch["labels"] >= 0).sum(), rel=1e-5)
    assert_close(halves, whole, atol=1e-6)


def test_a_batch_without_scored_tokens_has_loss_and_gradient_zero(tiny_run, batch_of, gradients_of):
    run = tiny_run(model=LAYER, batch_size=4, moe={"aux_loss_coef": 0.0})
    grads, total, parts = gradients_of(run, unscored(batch_of(run)))
    assert total == parts.loss == 0.0
    assert all(np.all(g == 0.0) for g in grads.values())


def test_balance_loss_trains_the_gate_in_proportion_to_its_coefficient(tiny_run, batch_of, gradients_of):
    # Case 6, without a task loss; the third run recomputes its activations.
    run = tiny_run(model=LAYER, batch_size=4, moe={"aux_loss_coef": 0.5})
    batch = unscored(batch_of(run))
    once = gradients_of(run, batch)
    twice = gradients_of(dataclasses.replace(run, moe=dataclasses.replace(run.moe, aux_loss_coef=1.0), remat="full"), batch)
    assert np.abs(once[0][GATE]).max() > 1e-5
    np.testing.assert_allclose(twice[0][GATE], 2 * once[0][GATE], rtol=1e-5, atol=1e-9)
    assert twice[1] == pytest.approx(2 * once[1], rel=1e-6)
    assert twice[1] == pytest.approx(twice[2].aux[0], rel=1e-6)


@pytest.mark.parametrize(("copies", "mesh"), [(2, {"data": 2}), (4, {"data": 2, "expert": 2})])
def test_balance_loss_does_not_grow_with_accumulation_or_devices(copies, mesh, tiny_run, batch_of, gradients_of):
    # Case 7: the same microbatch M times, over D devices.
    run = tiny_run(model=LAYER, batch_size=4, moe={"aux_loss_coef": 0.5})
    batch = unscored(batch_of(run))
    once = gradients_of(run, batch)
    repeated = {key: np.repeat(value, copies, axis=0) for key, value in batch.items()}
    many = gradients_of(dataclasses.replace(run, batch_size=4 * copies, accumulate=copies), repeated, **mesh)
    assert many[2].aux[0] == pytest.approx(once[2].aux[0], rel=1e-5)
    np.testing.assert_allclose(many[0][GATE], once[0][GATE], rtol=1e-4, atol=1e-8)


def test_padding_is_no_load(tiny_run, layout_of, fresh_state, batch_of, assert_close):
    # Case 8: 8 tokens, and the same padded to 32.
    run = tiny_run(model=LAYER, batch_size=1, seq_len=8, moe={"aux_loss_coef": 0.1, "z_loss_coef": 0.1, "capacity_factor": 1.0})
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 64, (1, 8)).astype(np.int32)
    short = {
        "input_ids": ids,
        "labels": np.roll(ids, -1, 1),
        "segment_ids": np.ones_like(ids),
        "position_ids": np.arange(8, dtype=np.int32)[None],
    }
    fill = {"input_ids": 5, "labels": -100, "segment_ids": 0, "position_ids": 0}
    padded = {key: np.pad(value, ((0, 0), (0, 24)), constant_values=fill[key]) for key, value in short.items()}
    layout = layout_of(run)
    step = make_train_step(run, layout)
    want_state, want = step(fresh_state(run, layout), short)
    state, got = step(fresh_state(run, layout), padded)
    assert want["router"]["load"].sum() == 16 - want["router"]["dropped"].sum()
    assert_close(jax.device_get(got), jax.device_get(want))
    assert_close(jax.device_get(state.biases), jax.device_get(want_state.biases))
    model = model_of(run, layout, fresh_state(run, layout))
    out, reference = (model(b["input_ids"], segment_ids=b["segment_ids"], position_ids=b["position_ids"]) for b in (padded, short))
    np.testing.assert_allclose(out.logits[:, :8], reference.logits, rtol=1e-5, atol=1e-5)


def test_a_batch_that_does_not_split_is_refused_with_the_numbers(tiny_run, layout_of):
    run = tiny_run(batch_size=8, accumulate=2)
    with pytest.raises(ValueError, match=r"batch_size=8 cannot be split into accumulate=2 .* data=8 x expert=1 .* 2 x 8 = 16"):
        make_gradients(run, layout_of(run, data=8))
