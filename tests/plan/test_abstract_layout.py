"""Layouts without devices equal those on real ones."""

import math
from dataclasses import replace

import jax
import pytest

from ernie_jax.config import RunConfig, default_config, run_config_from
from ernie_jax.plan.abstract_layout import abstract_layout
from ernie_jax.sharding import make_mesh
from ernie_jax.train.remat_prediction import StepShape
from ernie_jax.train.state import abstract_state, run_layout


def quick_run() -> RunConfig:
    config = default_config()
    config.model.preset, config.data.kind = "quickstart", "standard_library"
    config.batch_size, config.seq_len = 8, 128
    return run_config_from(config)


@pytest.mark.parametrize("sizes", [{"data": 2, "tensor": 2, "expert": 2}, {"pipeline": 2, "expert": 4}])
def test_shards_have_the_shapes_of_a_real_mesh(sizes: dict[str, int]) -> None:
    run = quick_run()
    run = replace(run, mesh=replace(run.mesh, **({"data": 1, "tensor": 1, "pipeline": 1, "expert": 1} | sizes)))
    real, planned = run_layout(run, make_mesh(**sizes)), abstract_layout(run)
    shapes = [[x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(abstract_state(run, layout))] for layout in (real, planned)]
    assert shapes[0] == shapes[1]
    assert sum(map(math.prod, shapes[0])) > 0
    assert StepShape.of(run, planned, "cpu") == StepShape.of(run, real)


def test_an_axis_without_a_size_is_refused() -> None:
    run = quick_run()
    with pytest.raises(ValueError, match=r"config.mesh.data=-1 takes the devices that are found"):
        abstract_layout(replace(run, mesh=replace(run.mesh, data=-1)))
