import json
import logging
from dataclasses import replace

import pytest

from ernie_jax.config import RunConfig, preset, run_config_from
from ernie_jax.config.compute import Fp8Config
from ernie_jax.config.run import (
    CheckpointConfig,
    DataConfig,
    MeshConfig,
    MoETrainConfig,
    OptimizerConfig,
    ScheduleConfig,
)

RUN = RunConfig(
    model=preset("quickstart"), steps=100, batch_size=16, seq_len=64, data=DataConfig(kind="standard_library"), remat=("qkv",)
)


def test_defaults_are_those_of_the_published_recipes():
    optimizer, moe = OptimizerConfig(), MoETrainConfig()
    assert (optimizer.b1, optimizer.b2, optimizer.eps, optimizer.weight_decay, optimizer.clip_norm) == (0.9, 0.95, 1e-8, 0.1, 1.0)
    assert optimizer.decay_exclude == ("bias", "norm")
    assert (moe.aux_loss_coef, moe.bias_update_rate, moe.capacity_factor) == (1e-5, 1e-3, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 10, "accumulate": 4}, r"batch_size=10.*accumulate=4 equal parts \(remainder 2\)"),
        ({"seq_len": 4096}, r"seq_len=4096 is beyond the model's max_position_embeddings=2048"),
        ({"steps": 0}, r"config\.steps=0; expected at least 1"),
        ({"dtype": "float8"}, r"config\.dtype='float8'; expected one of"),
        ({"attention": "flash"}, r"config\.attention='flash'"),
        (
            {"schedule": ScheduleConfig(warmup=50, steady_end=40)},
            r"steady_end=40; expected a step from the end of warm-up, 50, to the last step, 100",
        ),
        ({"schedule": ScheduleConfig(steady_end=101)}, r"steady_end=101;.*the last step, 100"),
        ({"moe": MoETrainConfig(orthogonal_groups=3)}, r"orthogonal_groups=3 does not divide the 16 experts"),
    ],
)
def test_fields_that_do_not_fit_together_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(RUN, **changes)


def test_steady_part_may_end_at_either_end():
    for end in (10, 100, None):
        assert replace(RUN, schedule=ScheduleConfig(warmup=10, steady_end=end)).schedule.steady_end == end
    # Only WSD has one.
    replace(RUN, schedule=ScheduleConfig(kind="cosine", steady_end=1000))


def test_warmup_beyond_the_run_is_said(caplog):
    with caplog.at_level(logging.WARNING):
        replace(RUN, schedule=ScheduleConfig(warmup=101))
    assert "config.schedule.warmup=101 is longer than config.steps=100" in caplog.text


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (MeshConfig, {"zero": 2}, r"config\.mesh\.zero=2; expected 0 .*1 .*3"),
        (MeshConfig, {"data": 0}, r"config\.mesh\.data=0; expected a positive size, or -1"),
        (MeshConfig, {"data": -1, "expert": -1}, r"data=-1, tensor=1, pipeline=1, expert=-1; at most one axis"),
        (MoETrainConfig, {"dispatch": "local_"}, r"config\.moe\.dispatch='local_'.*did you mean 'local'"),
        (MoETrainConfig, {"orthogonal_form": "both"}, r"config\.moe\.orthogonal_form='both'"),
        (MoETrainConfig, {"balance_scope": "run"}, r"config\.moe\.balance_scope='run'"),
        (MoETrainConfig, {"z_loss_coef": -0.1}, r"config\.moe\.z_loss_coef=-0\.1; expected at least 0"),
        (OptimizerConfig, {"b2": 1.0}, r"config\.optimizer\.b2=1\.0; expected a number in \[0, 1\)"),
        (OptimizerConfig, {"clip_norm": 0.0}, r"config\.optimizer\.clip_norm=0\.0.*None for no clipping"),
        (OptimizerConfig, {"max_nonfinite": 0}, r"config\.optimizer\.max_nonfinite=0"),
        (ScheduleConfig, {"kind": "cosin"}, r"config\.schedule\.kind='cosin'.*did you mean 'cosine'"),
        (ScheduleConfig, {"tail": "linear"}, r"config\.schedule\.tail='linear'"),
        (ScheduleConfig, {"peak": 1e-5, "minimum": 1e-4}, r"peak=1e-05, minimum=0\.0001"),
        (DataConfig, {}, r"config\.data\.paths is empty"),
        (DataConfig, {"paths": ("a",)}, r"config\.data\.tokenizer is not set"),
        (DataConfig, {"kind": "standard_library", "format": "csv"}, r"config\.data\.format='csv'"),
        (CheckpointConfig, {"keep": 0}, r"config\.checkpoint\.keep=0; expected at least 1"),
        (CheckpointConfig, {"every": -1}, r"config\.checkpoint\.every=-1"),
    ],
)
def test_sections_refuse_bad_values_by_their_path(section, values, message):
    with pytest.raises(ValueError, match=message):
        section(**values)


def test_zero_3_is_a_row_of_the_rules():
    assert [MeshConfig(zero=zero).rules for zero in (0, 1, 3)] == ["tp_sp", "tp_sp", "fsdp"]
    assert MeshConfig(data=-1, expert=4).sizes == {"data": -1, "tensor": 1, "pipeline": 1, "expert": 4}


def test_compute_takes_the_choices_of_the_run():
    run = replace(
        RUN, dtype="bfloat16", loss_chunk=7, moe=MoETrainConfig(dispatch="ragged", capacity_factor=2.0, router_temperature=0.5)
    )
    compute = run.compute
    assert (compute.dtype, compute.param_dtype, compute.remat, compute.loss_chunk) == ("bfloat16", "float32", ("qkv",), 7)
    assert (compute.dispatch, compute.capacity_factor, compute.router_temperature) == ("ragged", 2.0, 0.5)


@pytest.mark.parametrize(
    ("precision", "dtype", "fp8"), [(None, "bfloat16", False), ("float32", "float32", False), ("fp8", "bfloat16", True)]
)
def test_precision_takes_the_place_of_dtype(precision, dtype, fp8):
    settings = Fp8Config(gradient_format="e5m2", weight_gradient=True)
    run = replace(RUN, dtype="bfloat16", precision=precision, fp8=settings)
    assert (run.compute.dtype, run.compute.param_dtype, run.compute.fp8) == (dtype, "float32", settings if fp8 else None)
    assert run_config_from(json.loads(json.dumps(run.to_dict()))) == run


def test_precision_is_one_of_three_and_fp8_is_of_experts():
    with pytest.raises(ValueError, match=r"config\.precision='fp16'; expected one of"):
        replace(RUN, precision="fp16")
    with pytest.raises(ValueError, match=r"multiplies in FP8 in the experts, and this model has none"):
        replace(RUN, precision="fp8", model=replace(RUN.model, moe=None))
    with pytest.raises(ValueError, match=r"config\.fp8\.gradient_format='e4m2'; expected one of"):
        Fp8Config(gradient_format="e4m2")


def test_written_run_reads_back_as_the_same_run():
    assert run_config_from(json.loads(json.dumps(RUN.to_dict()))) == RUN
