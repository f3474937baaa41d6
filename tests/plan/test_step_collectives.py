"""Predicted collectives of training steps against those of compiled ones, recorded and made anew."""

import importlib.util
import json
import time
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from ernie_jax.config import default_config, run_config_from
from ernie_jax.plan.pipeline_shares import pipeline_shares
from ernie_jax.plan.step_collectives import predict_collectives

_SPEC = importlib.util.spec_from_file_location("compiled_collectives", Path(__file__).with_name("compiled_collectives.py"))
compiled = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(compiled)

RECORDED = json.loads(compiled.GOLDEN.read_text())
RECORDED_WITH = "0.10.2"
# What is said to be right: totals, and kinds and axes that carry much, as a share of all bytes.
WITHIN = 0.05


def assert_close(predicted, measured):
    total = sum(measured.values())
    assert sum(predicted.values()) == pytest.approx(total, rel=WITHIN)
    for key in predicted.keys() | measured.keys():
        assert abs(predicted.get(key, 0) - measured.get(key, 0)) <= WITHIN * total, key


def predicted_for(run, stage):
    return compiled.by_kind_and_axis(predict_collectives(run, "cpu", stage))


@pytest.mark.parametrize("entry", RECORDED, ids=lambda entry: f"{entry['name']}-{entry['stage']}")
def test_recorded_steps(entry):
    assert_close(predicted_for(compiled.run_of(entry["overrides"]), entry["stage"]), entry["collectives"])


def test_there_are_many_kinds_of_runs():
    runs = [compiled.run_of(entry["overrides"]) for entry in RECORDED if entry["stage"] == 0]
    assert len(runs) >= 24
    assert {run.remat for run in runs} >= {"none", "full", "experts", "attention"}
    assert {run.mesh.zero for run in runs} == {0, 1, 3}
    assert {run.pipeline.schedule for run in runs if run.mesh.pipeline > 1} == {"gpipe", "1f1b", "interleaved"}
    assert {axis for run in runs for axis, size in run.mesh.sizes.items() if size > 1} == {"data", "expert", "tensor", "pipeline"}


@pytest.mark.parametrize("name", ["mid-t2e4-none-zero0", "mid9-p2e4-none-zero0-1f1b"])
def test_compiled_anew(name):
    """What was recorded still holds, and so does what is predicted; of another JAX than the one recorded, the total: its compiler
    takes other ways from one layout to another."""
    entries = {entry["stage"]: entry for entry in RECORDED if entry["name"] == name}
    run = compiled.run_of(entries[0]["overrides"])
    hlo = compiled.compiled_text(run)
    for stage, entry in entries.items():
        found = compiled.measured(run, hlo, stage)
        if jax.__version__ != RECORDED_WITH:
            assert sum(found.values()) == pytest.approx(sum(entry["collectives"].values()), rel=WITHIN)
            continue
        assert_close(entry["collectives"], found)
        assert_close(predicted_for(run, stage), found)


def large(**changes):
    """300B on 2,048 devices."""
    config = default_config()
    config.model.preset, config.data.kind = "ernie-4.5-300b-a47b", "standard_library"
    config.batch_size, config.seq_len, config.dtype, config.remat = 2048, 4096, "bfloat16", "full"
    config.mesh.update({"pipeline": 8, "data": 8, "expert": 8, "tensor": 4, "zero": 1})
    config.pipeline.microbatches, config.moe.balance_scope = 32, "microbatch"
    return replace(run_config_from(config), **changes)


def test_a_large_model_by_hand():
    """A row of 4,096 tokens of 8,192 bfloat16 a microbatch; stages in the middle have 7 layers and run each microbatch forward,
    forward again at the start of its backward, and, as nothing is kept, once more before the gradients."""
    run = large()
    row, layers = 4096 * 8192 * 2, 7 * 32
    found = {}
    for use in predict_collectives(run, "gpu", stage=3):
        found[use.kind, use.axis, use.dtype] = found.get((use.kind, use.axis, use.dtype), 0) + use.bytes
    # Three times there, twice back, and both ways of the gradients, in buckets for 8 peers; lists of 8 experts and weights beside.
    assert found["all-to-all", "expert", "bf16"] == layers * 7 * 8 * row
    assert found["all-to-all", "expert", "f32"] == layers * 4 * 8 * 4096 * 16 * 4
    # Results of the experts, split along the row at once, and of attention: there, again, recomputed; its gradient three times.
    assert found["reduce-scatter", "tensor", "bf16"] == layers * (2 + 3 + 3) * row
    # The last microbatch is with the last stage 7 ticks after it began, and its gradient with the first 7 later; each tick sends a
    # quarter of a row both ways.
    assert found["collective-permute", "pipeline", "bf16"] == 2 * (32 + 7 + 7) * row // 4
    # The first stage begins with a dense prefix.
    totals = [sum(use.bytes for use in predict_collectives(run, "gpu", stage)) for stage in range(8)]
    fullest = sum(use.bytes for use in predict_collectives(run, "gpu"))
    assert fullest == max(totals)


def test_platforms():
    """On CPU bfloat16 travels as float32, and sums that are split are sums: kinds differ, and bytes by at most two."""
    run = large()
    cpu, gpu = (predict_collectives(run, platform, 0) for platform in ("cpu", "gpu"))
    assert "bf16" not in {use.dtype for use in cpu}
    assert {use.scope for use in cpu if use.kind == "reduce-scatter"} == {"moe/results"}
    assert {use.scope for use in gpu if use.kind == "reduce-scatter"} > {"moe/results", "attention", "transpose/weights"}
    assert 1.8 < sum(use.bytes for use in cpu) / sum(use.bytes for use in gpu) < 2


def test_a_search_can_call_it_often():
    run = large()
    predict_collectives(run)
    rounds = []
    for _ in range(10):
        start = time.process_time()
        predict_collectives(run)
        rounds.append(time.process_time() - start)
    assert min(rounds) < 0.02


def test_shares_of_stages():
    """1F1B of 4 microbatches on 2 stages is 6 ticks (see `test_permutes_of_a_pipeline`); the last stage runs nothing forward alone,
    and the head with each backward. With two chunks a stage, half of the backwards of the ends touch tokens or loss."""
    overrides = {"mesh": {"pipeline": 2, "expert": 4}, "pipeline": {"microbatches": 4}}
    run = compiled.run_of(overrides | {"model": {"num_hidden_layers": 9}})
    assert pipeline_shares(run, 0) == {"stage_forward": 4 / 6, "stage_backward": 4 / 6, "embed": 1, "head_and_loss": 0}
    assert pipeline_shares(run, 1) == {"stage_forward": 0, "stage_backward": 4 / 6, "embed": 0, "head_and_loss": 1}
    twice = replace(run, pipeline=replace(run.pipeline, schedule="interleaved", virtual_stages=2))
    first, last = (pipeline_shares(twice, stage) for stage in (0, 1))
    assert (first["embed"], first["head_and_loss"], last["embed"], last["head_and_loss"]) == (0.5, 0, 0, 0.5)
    # Forwards of the last stage are those of its first chunk.
    assert last["stage_forward"] == last["stage_backward"] / 2 == first["stage_forward"] / 2
    # Five layers over two stages: three places, of which the last stage leaves one out.
    uneven = compiled.run_of(overrides)
    assert pipeline_shares(uneven, 0)["stage_forward/attention"] == 1
    assert pipeline_shares(uneven, 1)["stage_backward/attention"] == pytest.approx(2 / 3)
    counting = replace(run, moe=replace(run.moe, balance_scope="step"))
    # Forward alone 4 microbatches take 5 ticks.
    assert pipeline_shares(counting, 1)["count_choices/stage_forward"] == 4 / 5
    assert pipeline_shares(replace(run, mesh=replace(run.mesh, pipeline=1)), 0) == {}


def test_what_cannot_be_predicted():
    run = large()
    with pytest.raises(ValueError, match="stage 8 of a pipeline of 8 stages; expected 0 to 7"):
        predict_collectives(run, stage=8)
    with pytest.raises(ValueError, match="stage 1 of a mesh without pipeline stages"):
        predict_collectives(replace(run, mesh=replace(run.mesh, pipeline=1)), stage=1)
    with pytest.raises(ValueError, match=r"config.mesh.data=-1 takes the devices that are found"):
        predict_collectives(replace(run, mesh=replace(run.mesh, data=-1)))
