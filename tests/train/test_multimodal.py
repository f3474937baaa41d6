"""Training on text and images: microbatches, losses by modality, stages that train a part of the model."""

import dataclasses

import jax
import numpy as np
import pytest

from ernie_jax.checkpoint import save_pretrained
from ernie_jax.config.run import LossConfig
from ernie_jax.models import inputs_of
from ernie_jax.sharding import variables_by_path
from ernie_jax.testing import multimodal_rows, tiny_vl
from ernie_jax.train.gradients import make_gradients
from ernie_jax.train.start import starting_state
from ernie_jax.train.state import init_state
from ernie_jax.train.step import make_eval_step, make_train_step, model_of

MODEL = tiny_vl(num_hidden_layers=2, num_experts_per_tok=2)
ROWS = multimodal_rows(MODEL)
MOE = {"aux_loss_coef": 0.1, "z_loss_coef": 0.01, "orthogonal_coef": 0.1}
ROOM = 224


@pytest.fixture(scope="module")
def run_of(tiny_run):
    return lambda **changes: tiny_run(model=MODEL, batch_size=8, seq_len=24, moe=changes.pop("moe", MOE), **changes)


@pytest.fixture(scope="module")
def gradients_of(layout_of, fresh_state):
    def compute(run, batch, **mesh):
        layout = layout_of(run, **mesh)
        return jax.device_get(jax.jit(make_gradients(run, layout))(fresh_state(run, layout), batch))

    return compute


@pytest.fixture(scope="module")
def whole(run_of, gradients_of):
    return gradients_of(run_of(), ROWS.batch(max_patches=ROOM))


def test_microbatches_on_two_devices_equal_one_step(run_of, gradients_of, whole, assert_close):
    """A microbatch of a shard may hold no image at all; counts and means are of the whole step."""
    parts = gradients_of(run_of(accumulate=4), ROWS.batch(2, accumulate=4), data=2)
    assert_close(parts, whole, rtol=2e-5, atol=2e-6)


def test_losses_by_kind_of_document_and_by_modality(run_of, layout_of, fresh_state, whole):
    run = run_of()
    layout = layout_of(run)
    batch = ROWS.batch(max_patches=ROOM)
    state = fresh_state(run, layout)
    logits = np.asarray(model_of(run, layout, state).forward(inputs_of(batch)).logits, np.float64)
    labels, mixed = batch["labels"], batch["document_kinds"] != 0
    log_z = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    losses = log_z - np.take_along_axis(logits, np.maximum(labels, 0)[..., None], -1)[..., 0]
    _, _, parts = whole
    scored = labels >= 0
    assert parts.loss == pytest.approx(losses[scored].mean(), rel=1e-5)
    expected = [losses[scored & ~mixed].mean(), losses[scored & mixed].mean()]
    np.testing.assert_allclose(parts.modality_loss, expected, rtol=1e-5)
    totals, counts = make_eval_step(run, layout)(state, batch)
    np.testing.assert_array_equal(counts, [(scored & ~mixed).sum(), (scored & mixed).sum()])
    np.testing.assert_allclose(totals / counts, expected, rtol=1e-5)
    # No label stands on an image: its tokens are never predicted.
    assert not (scored[:, :-1] & (batch["modality_ids"][:, 1:] != 0)).any()
    # K experts a token in each modality, and the balance loss is K where the load is even.
    assert (parts.aux > 1.0).all() and parts.aux.shape == parts.z.shape == parts.orthogonal.shape == (2,)


def test_token_balanced_divides_by_a_constant(run_of, gradients_of):
    """Gradient of `sum CE / (rows x tokens)` instead of `sum CE / labels`, and the same loss reported."""
    none = {"aux_loss_coef": 0.0}
    batch = ROWS.batch(max_patches=ROOM)
    mean = gradients_of(run_of(moe=none), batch)
    balanced = gradients_of(run_of(moe=none, loss=LossConfig(token_balanced=True)), batch)
    ratio = (batch["labels"] >= 0).sum() / batch["labels"].size
    assert 0.1 < ratio < 0.7
    assert balanced[2].loss == mean[2].loss
    for path, gradient in mean[0].items():
        np.testing.assert_allclose(balanced[0][path], ratio * gradient, rtol=1e-4, atol=1e-7, err_msg=path)


def test_weights_of_documents_and_of_vision_routers(run_of, gradients_of):
    batch = ROWS.batch(max_patches=ROOM)
    loss = LossConfig(text_weight=0.0, multimodal_weight=2.0, vision_router_weight=0.0)
    _, total, parts = gradients_of(run_of(loss=loss), batch)
    mixed = ((batch["labels"] >= 0) & (batch["document_kinds"] != 0)).sum()
    text_losses = (
        MOE["aux_loss_coef"] * parts.aux[0] + MOE["z_loss_coef"] * parts.z[0] + MOE["orthogonal_coef"] * parts.orthogonal[0]
    )
    assert total == pytest.approx(2 * parts.modality_loss[1] * mixed / (batch["labels"] >= 0).sum() + text_losses, rel=1e-5)


STAGES = {
    "text": ("!vision_tower/*", "!resampler/*", "!*/vision_*"),
    "adapter and vision experts": ("resampler/*", "*/vision_experts/*", "*/vision_router/*"),
    "tower": ("vision_tower/*", "resampler/*"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_trains_its_part_and_nothing_else(run_of, layout_of, fresh_state, stage):
    def trained(path):
        vision = path.startswith(("vision_tower", "resampler")) or "/vision_" in path
        inside = {"text": not vision, "tower": path.startswith(("vision_tower", "resampler"))}
        return inside.get(stage, vision and not path.startswith("vision_tower"))

    run = run_of(trainable=STAGES[stage])
    layout = layout_of(run)
    # Frozen parameters have no entry in the optimiser, so the state is another one.
    state = init_state(run, layout)
    before = jax.device_get((variables_of(state.params), variables_of(state.biases)))
    assert {path for path in before[0] if trained(path)} == set(state.opt_state.mu)
    step = make_train_step(run, layout)
    batch = ROWS.batch(max_patches=ROOM)
    for _ in range(2):
        state, metrics = step(state, batch)
    for path, value in variables_of(state.params).items():
        assert np.array_equal(value, before[0][path]) != trained(path), path
    for path, value in variables_of(state.biases).items():
        assert np.array_equal(value, before[1][path]) != trained(path.replace("/bias", "/gate")), path
    assert metrics["vision_router"]["load"].shape == metrics["router"]["load"].shape == (1, 8)
    assert metrics["vision_tokens"] == (batch["modality_ids"] != 0).sum()
    assert metrics["patches"] == (batch["patch_segment_ids"] != 0).sum()


def variables_of(state):
    return {path: np.asarray(v.get_value()) for path, v in variables_by_path(state).items()}


def test_a_run_starts_from_the_export_of_another(run_of, layout_of, tmp_path):
    first = run_of(seed=3)
    layout = layout_of(first, data=2, tensor=2)
    state = init_state(first, layout)
    save_pretrained(model_of(first, layout, state), tmp_path / "export")
    second = run_of(init_from=str(tmp_path / "export"), trainable=STAGES["tower"])
    started = starting_state(second, layout)
    for mine, theirs in ((started.params, state.params), (started.biases, state.biases)):
        for path, value in variables_of(mine).items():
            np.testing.assert_array_equal(value, variables_of(theirs)[path])
    assert set(started.opt_state.mu) == {p for p in variables_of(state.params) if p.startswith(("vision_tower", "resampler"))}
    other = dataclasses.replace(second, model=tiny_vl(num_hidden_layers=2, num_experts_per_tok=3))
    with pytest.raises(ValueError, match=r"is not of this run's model: moe is .*num_experts_per_tok"):
        starting_state(other, layout)
