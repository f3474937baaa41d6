"""Runs that move experts: the losses of a run that does not, the figures they leave, resuming, and switching it on and off."""

import os
import signal

import numpy as np
import pytest
from matplotlib.image import imread
from safetensors.numpy import load_file

from ernie_jax.checkpoint import save_pretrained
from ernie_jax.config.run import SampleConfig
from ernie_jax.testing import tiny_moe
from ernie_jax.train import train
from ernie_jax.train.balance import BalanceHook
from ernie_jax.train.move_experts import make_move
from ernie_jax.train.records import read_records
from ernie_jax.train.state import init_state
from ernie_jax.train.step import model_of

MODEL = tiny_moe(num_experts_per_tok=2, vocab_size=300)
STEPS = 12


@pytest.fixture(scope="module")
def make_run(tiny_run):
    def make(every=3, **changes):
        moe = {"placement_every": every, "placement_nodes": 2, "placement_threshold": 0.0, "balance_window": 4}
        sections = {"mesh": {"data": 2, "expert": 4}, "schedule": {"warmup": 2}, "checkpoint": {"every": 5}, "moe": moe}
        data = type(tiny_run().data)(kind="standard_library", max_bytes=300_000)
        return tiny_run(**{"model": MODEL, "steps": STEPS, "log_every": 1, "data": data} | sections | changes)

    return make


@pytest.fixture(scope="module")
def moving(make_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("moving")
    train(make_run(), folder, say=lambda line: None)
    return folder


def records_of(folder):
    return read_records(folder / "metrics.jsonl")


def stop(model, tokenizer, prompt, *, max_new_tokens):
    """Asked for a sample at step 4, ends the run after step 5."""
    os.kill(os.getpid(), signal.SIGTERM)
    return "stop"


def weights(folder):
    return load_file(folder / "export" / "model.safetensors")


def test_losses_and_weights_are_those_of_a_run_that_moves_nothing(moving, make_run, tmp_path):
    train(make_run(every=0), tmp_path, say=lambda line: None)
    still, moved = records_of(tmp_path), records_of(moving)
    assert [r["step"] for r in moved] == [r["step"] for r in still] == list(range(1, STEPS + 1))
    for key in ("loss", "total", "grad_norm", "aux"):
        np.testing.assert_allclose([r[key] for r in moved], [r[key] for r in still], rtol=1e-5, err_msg=key)
    for a, b in zip(moved, still, strict=True):
        np.testing.assert_array_equal(a["router"]["load"], b["router"]["load"])
    got, want = weights(moving), weights(tmp_path)
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_what_a_placement_leaves(moving):
    records = records_of(moving)
    noted = {r["step"]: r["placement"]["text"] for r in records if "placement" in r}
    assert sorted(noted) == [3, 6, 9, 12]
    assert noted[3]["moved"] > 0
    for figures in noted.values():
        assert np.shape(figures["before"]) == np.shape(figures["after"]) == (2,)
        assert all(after >= before for before, after in zip(figures["before"], figures["after"], strict=True))
    image = imread(moving / "plots" / "placement.png")
    assert image.shape[1] > image.shape[0] and np.ptp(image) > 0.5
    # Before the first move expert e is on device e // 2, and devices 0 and 1 are the first node.
    for record in records[:3]:
        router = record["router"]
        load = np.array(router["load"])
        np.testing.assert_array_equal(router["device_load"], load.reshape(2, 4, 2).sum(-1))
        np.testing.assert_allclose(router["device_balance"], load.sum(-1) / 4 / load.reshape(2, 4, 2).sum(-1).max(-1), rtol=1e-6)
        np.testing.assert_allclose(router["node_balance"], load.sum(-1) / 2 / load.reshape(2, 2, 4).sum(-1).max(-1), rtol=1e-6)
    # The window that a plan is made from: the steps since the last.
    window = np.sum([r["router"]["load"] for r in records[:3]], axis=0).reshape(2, 4, 2).sum(-1)
    np.testing.assert_allclose(noted[3]["before"], window.mean(-1) / window.max(-1), atol=1e-4)
    rates = [r["router"]["device_balance"] for r in records]
    np.testing.assert_allclose(records[7]["router"]["device_balance_average"], np.mean(rates[4:8], axis=0))


def test_a_run_cut_between_placements_is_the_run_in_one_piece(moving, make_run, tmp_path):
    cut = train(make_run(sample=SampleConfig(every=4, prompt="x")), tmp_path, generate=stop, say=lambda line: None)
    assert (cut.stopped, cut.steps) == ("SIGTERM", 5)
    train(make_run(), tmp_path, say=lambda line: None)
    for one, other in zip(records_of(tmp_path), records_of(moving), strict=True):
        assert all(one.get(key) == other.get(key) for key in ("step", "loss", "grad_norm", "router", "placement"))
    got, want = weights(tmp_path), weights(moving)
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
    with pytest.raises(ValueError, match=r"config\.moe\.placement_every: 3 -> 0"):
        train(make_run(every=0, steps=STEPS + 2), tmp_path, say=lambda line: None)


def test_a_run_that_moved_nothing_may_begin_to(make_run, tmp_path):
    train(make_run(every=0, sample=SampleConfig(every=4, prompt="x")), tmp_path, generate=stop, say=lambda line: None)
    train(make_run(), tmp_path, say=lambda line: None)
    assert [r["step"] for r in records_of(tmp_path) if "placement" in r] == [6, 9, 12]


def test_an_export_has_the_experts_in_their_order(make_run, layout_of, tmp_path):
    run = make_run()
    layout = layout_of(run, data=2, expert=4)
    state = init_state(run, layout)
    save_pretrained(model_of(run, layout, state), tmp_path / "before")
    places = np.stack([np.random.default_rng(i).permutation(8) for i in range(2)]).astype(np.int32)
    state = make_move(run, layout)(state, {"router": places})
    save_pretrained(model_of(run, layout, state), tmp_path / "after")
    assert (tmp_path / "before" / "model.safetensors").read_bytes() == (tmp_path / "after" / "model.safetensors").read_bytes()


def test_nodes_that_do_not_fit_are_refused_before_any_work(make_run, tmp_path):
    run = make_run(moe={"placement_every": 3, "placement_nodes": 3})
    with pytest.raises(ValueError, match=r"config\.moe\.placement_nodes=3, config\.mesh\.expert=4"):
        train(run, tmp_path / "run", say=lambda line: None)
    assert not (tmp_path / "run").exists()


def test_averages_are_over_the_window_and_go_on_from_the_records():
    records = [{"router": {"balance": [rate, 1.0]}, "vision_router": {}} for rate in (0.2, 0.4, 0.6)]
    hook = BalanceHook(2)
    for record in records:
        hook.at_record(record, False)
    assert [r["router"]["balance_average"] for r in records] == [[0.2, 1.0], [pytest.approx(0.3), 1.0], [pytest.approx(0.5), 1.0]]
    later = {"router": {"balance": [1.0, 1.0]}}
    BalanceHook(2, records).at_record(later, False)
    assert later["router"]["balance_average"] == [pytest.approx(0.8), 1.0]
