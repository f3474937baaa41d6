"""`remat="auto"`, the FLOPs and bytes it goes by, and the guard that recomputes experts on imbalance."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import pytest

from ernie_jax.config.run import DataConfig
from ernie_jax.testing import tiny_dense, tiny_moe, tiny_vl
from ernie_jax.train import train
from ernie_jax.train.abstract_batch import abstract_batch
from ernie_jax.train.imbalance import ImbalanceGuard, load_skew
from ernie_jax.train.program_flops import program_flops
from ernie_jax.train.records import read_records
from ernie_jax.train.remat_choice import candidates, choose_remat, compile_step, step_bytes, step_flops
from ernie_jax.train.remat_prediction import StepShape, extra_flops, unit_bytes

MODEL = tiny_moe(num_experts_per_tok=2, vocab_size=300)


def test_flops_count_loops_by_their_rounds_and_leave_out_what_nobody_needs():
    a, b = jnp.ones((4, 8)), jnp.ones((8, 8))

    def scanned(x):
        def body(carry, w):
            # The second product feeds a carry that nothing reads.
            return (carry[0] @ w, carry[1] @ w), None

        return jax.lax.scan(body, (x, x), jnp.ones((5, 8, 8)))[0][0]

    assert program_flops(scanned, a) == 5 * 2 * 4 * 8 * 8
    assert program_flops(jax.jit(lambda x: (x @ b, (x @ b).sum())[0]), a) == 2 * 4 * 8 * 8
    assert program_flops(lambda x: jax.lax.cond(x.sum() > 0, lambda x: x @ b @ b, lambda x: x @ b, x), a) == 2 * 2 * 4 * 8 * 8
    rows, weights, sizes = jnp.ones((6, 8)), jnp.ones((3, 8, 10)), jnp.array([2, 2, 2])
    # Forward, and backward to rows and weights.
    grads = jax.value_and_grad(lambda r, w: jax.lax.ragged_dot(r, w, sizes).sum(), (0, 1))
    assert program_flops(grads, rows, weights, ragged_share=0.5) == 3 * 2 * 3 * 8 * 10
    # Recomputed in the backward pass: one product more than the three of forward and backward.
    remat = jax.checkpoint(lambda x, w: jnp.sin(x @ w) @ w)
    plain = program_flops(jax.value_and_grad(lambda x, w: (jnp.sin(x @ w) @ w).sum(), (0, 1)), a, b)
    assert program_flops(jax.value_and_grad(lambda x, w: remat(x, w).sum(), (0, 1)), a, b) - plain == 2 * 4 * 8 * 8


@pytest.mark.parametrize(("attention", "mesh", "mtp_blocks"), [("dense", {}, 0), ("chunked", {"tensor": 2, "expert": 2}, 2)])
def test_predicted_flops_are_those_of_the_program(tiny_run, layout_of, attention, mesh, mtp_blocks):
    """Of every policy of a text model, to the last operation."""
    model = dataclasses.replace(MODEL, num_nextn_predict_layers=mtp_blocks)
    run = tiny_run(model=model, attention=attention, seq_len=256, moe={"aux_loss_coef": 0.0})
    layout = layout_of(run, **mesh)
    plain = step_flops(run, layout)
    shape = StepShape.of(run, layout)
    extras = {}
    for policy in candidates(MODEL)[1:]:
        got = step_flops(dataclasses.replace(run, remat=policy), layout) - plain
        assert got == pytest.approx(extra_flops(run, shape, policy), rel=1e-9), policy
        extras[policy] = got
    assert 0 < extras["experts"] < extras["full"] and 0 < extras["attention"] < extras["full"]


def test_predicted_bytes_by_hand(tiny_run, layout_of):
    """8 x 128 tokens of width 32, float32. `launch/bench.py remat` compares with compiled steps."""
    run = tiny_run(model=MODEL, seq_len=128, attention="dense")
    shape = StepShape.of(run, layout_of(run))
    assert unit_bytes(MODEL, shape, "full", ("moe",)) == 8 * 128 * 32 * 4
    # Beside the input: the residual, the gate and up of the shared expert of width 16, 8 scores, 2 rows of 2 x 16 a token, and
    # the order of the rows and its inverse.
    more = 8 * 128 * (32 + 2 * 16 + 8 + 2 * 2 * 16 + 2 * 2) * 4
    assert unit_bytes(MODEL, shape, "attention", ("moe",)) == 8 * 128 * 32 * 4 + more


def chosen(run, layout):
    lines = []
    return *choose_remat(run, layout, lines.append), lines


def test_auto_takes_the_cheapest_that_fits(tiny_run, layout_of):
    run = tiny_run(model=tiny_dense(), remat="auto", seq_len=64, attention="dense", remat_budget=0.5)
    layout = layout_of(run)
    sizes = {p: step_bytes(compile_step(dataclasses.replace(run, remat=p), layout)) for p in ("none", "full")}
    assert sizes["full"] < sizes["none"]
    wide, step, lines = chosen(dataclasses.replace(run, device_memory_bytes=2 * sizes["none"]), layout)
    assert wide.remat == "none" and step_bytes(step) == sizes["none"]
    assert "not compiled" in lines[0] and "only indicative on CPU" in lines[0] and lines[0].endswith("remat = none")
    tight, step, _ = chosen(dataclasses.replace(run, device_memory_bytes=2 * (sizes["none"] - 1)), layout)
    assert tight.remat != "none" and step_bytes(step) < sizes["none"]
    assert step_flops(tight, layout) > step_flops(wide, layout)
    with pytest.raises(
        ValueError, match=r"(?s)fits 500 bytes a device under no policy:.*none .* no\n.*full .* no\n.*config\.accumulate"
    ):
        chosen(dataclasses.replace(run, device_memory_bytes=1000), layout)


def test_auto_says_what_it_lacks(tiny_run, layout_of):
    run = tiny_run(model=MODEL, remat="auto")
    with pytest.raises(ValueError, match=r"'cpu' does not tell it; set config\.device_memory_bytes"):
        chosen(run, layout_of(run))
    data = DataConfig(kind="multimodal", paths=("a",), tokenizer="t")
    vision = tiny_run(model=tiny_vl(), remat="auto", device_memory_bytes=10**9, data=data)
    with pytest.raises(ValueError, match=r"config\.data\.max_patches is not set"):
        chosen(vision, layout_of(vision))
    offload = dataclasses.replace(run, remat="offload")
    with pytest.raises(ValueError, match="backend 'cpu'"):
        chosen(offload, layout_of(run))
    with pytest.raises(ValueError, match="choose_remat"):
        compile_step(run, layout_of(run))


def test_skew_is_of_devices_over_all_layers_and_modalities():
    # Two layers of four experts on two devices: 6 + 2 rows on the first, 2 + 6 on the second.
    load = [[3, 3, 1, 1], [1, 1, 3, 3]]
    assert load_skew([load], 2) == 0
    assert load_skew([load[:1]], 2) == pytest.approx(0.5)
    assert load_skew([load[:1], [[0, 0, 8, 0]]], 2) == pytest.approx(10 / 8 - 1)
    assert load_skew([[[0, 0, 0, 0]]], 2) == 0


def test_imbalance_swaps_the_step_once_where_memory_is_short(tiny_run, tmp_path, caplog):
    data = DataConfig(kind="standard_library", max_bytes=300_000)
    sections = {"mesh": {"expert": 2, "data": -1}, "checkpoint": {"every": 0}}
    run = tiny_run(model=MODEL, steps=6, log_every=2, remat_on_imbalance=0.0, device_memory_bytes=1000, data=data, **sections)
    caplog.set_level(logging.INFO, logger="ernie_jax")
    train(run, tmp_path, say=lambda _: None)
    found = read_records(tmp_path / "metrics.jsonl")
    assert [r["experts_recomputed"] for r in found] == [1, 1, 1]
    assert all(r["load_skew"] > 0 for r in found)
    (message,) = [r.getMessage() for r in caplog.records if "experts are recomputed from here on" in r.getMessage()]
    assert "after step 2:" in message and "remat none -> experts=full,vision_experts=full" in message


def test_buffers_of_a_capacity_hold_a_skew_below_it(tiny_run, layout_of):
    run = tiny_run(model=MODEL, moe={"capacity_factor": 1.25}, mesh={"expert": 2})
    layout = layout_of(run, expert=2)
    step = compile_step(run, layout)
    guard = ImbalanceGuard(run, layout, step, 10**9)
    assert guard.needed(0.2) == step_bytes(step)
    # 2 MoE layers; 4 rows of 12 tokens a device; 4 of 8 experts there, each taking ceil(1.25 x 12 x 2 / 8) = 4 a row of all 8 rows;
    # width 16.
    activations = 2 * (4 * 4 * 8) * 2 * 16 * 4
    assert guard.needed(0.75) == int(step_bytes(step) + 0.5 * activations)
    guard.at_record({"step": run.log_every, "router": {"load": [[9, 9, 9, 9, 0, 0, 0, 0]]}}, False)
    assert not guard.recomputing, "twice the mean on one device, and room for it"
    unbounded = dataclasses.replace(run, moe=dataclasses.replace(run.moe, capacity_factor=None))
    assert ImbalanceGuard(unbounded, layout, step, 10**9).needed(0.9) == step_bytes(step)


def test_a_batch_without_values_has_the_shapes_of_the_pipeline(tiny_run, layout_of):
    model = tiny_vl()
    run = tiny_run(model=model, accumulate=2, data=DataConfig(kind="multimodal", paths=("a",), tokenizer="t", max_patches=64))
    batch = abstract_batch(run, layout_of(run, data=2, tensor=2))
    assert batch["pixel_values"].shape == (4, 2, 64, 12) and batch["patch_pairs"].shape == (4, 2, 16, 2)
    assert batch["position_ids"].shape == (8, 12, 3) and batch["modality_ids"].shape == (8, 12)
