"""Runs with multi-token prediction: however a step is split, what is reported, where a run's blocks come from."""

import dataclasses

import jax
import numpy as np
import pytest

from ernie_jax.checkpoint import save_pretrained
from ernie_jax.config.run import LossConfig
from ernie_jax.sharding import variables_by_path
from ernie_jax.testing import tiny_moe, tiny_vl
from ernie_jax.train.gradients import make_gradients
from ernie_jax.train.start import starting_state
from ernie_jax.train.state import abstract_state, init_state
from ernie_jax.train.step import make_eval_step, make_train_step, model_of

MODEL = tiny_moe(num_hidden_layers=2, num_experts_per_tok=2, num_nextn_predict_layers=2)
NO_ROUTER_LOSS = {"aux_loss_coef": 0.0}


@pytest.fixture(scope="module")
def run_of(tiny_run):
    return lambda weight=0.3, **changes: tiny_run(**{"model": MODEL, "loss": LossConfig(mtp_weight=weight)} | changes)


def test_a_step_does_not_depend_on_how_it_is_split(run_of, layout_of, fresh_state, batch_of, assert_close):
    """Microbatches whose blocks are scored at different numbers of places, one of them at none."""
    loss = LossConfig(mtp_weight=0.5, token_balanced=True)
    whole = run_of(loss=loss)
    batch = batch_of(whole)
    batch["labels"][1::4, 3:] = -100
    results = []
    for run, sizes in ((whole, {}), (run_of(loss=loss, accumulate=4), {"data": 2, "tensor": 2})):
        layout = layout_of(run, **sizes)
        results.append(jax.device_get(jax.jit(make_gradients(run, layout))(fresh_state(run, layout), batch)))
    assert results[0][2].mtp > 1
    assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def steps(run_of, layout_of, batch_of):
    """(run, state before, metrics of 20 steps on one batch, evaluation of the first state)."""
    run = run_of(moe=NO_ROUTER_LOSS, schedule={"kind": "constant", "peak": 3e-3})
    layout = layout_of(run)
    state, batch, metrics = init_state(run, layout), batch_of(run), []
    evaluated = jax.device_get(make_eval_step(run, layout)(state, batch))
    step = make_train_step(run, layout)
    for _ in range(20):
        state, found = step(state, batch)
        metrics.append(jax.device_get(found))
    return run, metrics, evaluated


def test_metrics_have_the_loss_without_its_weight(steps):
    _, metrics, evaluated = steps
    assert metrics[0]["total"] == pytest.approx(metrics[0]["loss"] + 0.3 * metrics[0]["loss_mtp"], rel=1e-6)
    # What is evaluated is the next token alone.
    assert evaluated[0].sum() / evaluated[1].sum() == pytest.approx(metrics[0]["loss"], rel=1e-5)


def test_the_blocks_learn(steps):
    _, metrics, _ = steps
    assert metrics[-1]["loss_mtp"] < 0.8 * metrics[0]["loss_mtp"]


def test_weight_0_trains_a_model_without_blocks(run_of, layout_of, batch_of):
    run = run_of(0.0, moe=NO_ROUTER_LOSS)
    layout = layout_of(run)
    assert not any("mtp" in path for path in variables_by_path(abstract_state(run, layout).params))
    _, metrics = make_train_step(run, layout)(init_state(run, layout), batch_of(run))
    assert "loss_mtp" not in metrics and metrics["total"] == metrics["loss"]


def test_a_run_starts_from_an_export_with_blocks_and_not_from_one_without(run_of, layout_of, tmp_path):
    run = run_of()
    layout = layout_of(run, data=2)
    state = init_state(run, layout)
    model = model_of(run, layout, state)
    save_pretrained(model, tmp_path / "with")
    model.mtp = None
    save_pretrained(model, tmp_path / "without")
    started = starting_state(dataclasses.replace(run, seed=5, init_from=str(tmp_path / "with")), layout)
    for (path, mine), theirs in zip(
        variables_by_path(started.params).items(), variables_by_path(state.params).values(), strict=True
    ):
        np.testing.assert_array_equal(mine.get_value(), theirs.get_value(), err_msg=path)
    with pytest.raises(ValueError, match=r"has no weights of multi-token prediction.*set config.loss.mtp_weight to 0"):
        starting_state(dataclasses.replace(run, init_from=str(tmp_path / "without")), layout)
    fewer = dataclasses.replace(run, model=dataclasses.replace(MODEL, num_nextn_predict_layers=1))
    with pytest.raises(ValueError, match="num_nextn_predict_layers is 2 there and 1 here"):
        starting_state(dataclasses.replace(fewer, init_from=str(tmp_path / "with")), layout)
    no_blocks = dataclasses.replace(run, loss=LossConfig(mtp_weight=0.0))
    for folder in ("with", "without"):
        started = starting_state(dataclasses.replace(no_blocks, init_from=str(tmp_path / folder)), layout)
        assert not any("mtp" in path for path in variables_by_path(started.params))


def test_what_makes_no_sense_is_refused(run_of):
    with pytest.raises(ValueError, match="mtp_weight"):
        LossConfig(mtp_weight=-0.1)
    with pytest.raises(ValueError, match=r"num_nextn_predict_layers=1 of a vision-language model"):
        run_of(model=tiny_vl(num_nextn_predict_layers=1))
    assert run_of(0.0, model=tiny_vl(num_nextn_predict_layers=1)).mtp_blocks == 0
