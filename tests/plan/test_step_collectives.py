"""Predicted collectives of training steps against those of compiled ones, recorded and made anew."""

import importlib.util
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ernie_jax.config import default_config, run_config_from
from ernie_jax.plan.pipeline_shares import pipeline_shares
from ernie_jax.plan.step_collectives import predict_collectives

_SPEC = importlib.util.spec_from_file_location("compiled_collectives", Path(__file__).with_name("compiled_collectives.py"))
compiled = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(compiled)

RECORDED = json.loads(compiled.GOLDEN.read_text())
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
    """What was recorded still holds, and so does what is predicted."""
    entries = {entry["stage"]: entry for entry in RECORDED if entry["name"] == name}
    run = compiled.run_of(entries[0]["overrides"])
    hlo = compiled.compiled_text(run)
    for stage, entry in entries.items():
        found = compiled.measured(run, hlo, stage)
        assert_close(entry["collectives"], found)
        assert_close(predicted_for(run, stage), found)
