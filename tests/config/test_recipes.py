import runpy
from pathlib import Path

import pytest

from ernie_jax.config import preset, run_config_from

FOLDER = Path(__file__).parents[2] / "configs"
RECIPES = sorted(FOLDER.glob("*.py"))


def recipe(name):
    return runpy.run_path(str(FOLDER / f"{name}.py"))["get_config"]()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_valid_and_opens_with_its_command(path):
    module = runpy.run_path(str(path))
    run = run_config_from(module["get_config"]())
    assert run.mesh.pipeline == 1
    first = module["__doc__"].splitlines()[0]
    assert first.startswith(f"python launch/train.py --config=configs/{path.name} --workdir=runs/")


def test_the_four_recipes_exist():
    names = {path.stem for path in RECIPES}
    assert {"quickstart", "ernie_4_5_0_3b", "ernie_4_5_21b_a3b_pretrain", "ernie_4_5_300b_a47b_pretrain"} <= names


# batch, accumulate, peak, minimum, warm-up, steady steps, seed, orthogonal coefficient
PUBLISHED = {
    "ernie_4_5_21b_a3b_pretrain": (128, 8, 3.14e-4, 3.14e-6, 2000, 603_000, 42, 1e-3),
    "ernie_4_5_300b_a47b_pretrain": (15_120, 15, 2.2e-4, 2.2e-5, 200, 231_084, 666, 0.0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_recipes(name):
    run = run_config_from(recipe(name))
    batch, accumulate, peak, minimum, warmup, steady, seed, orthogonal = PUBLISHED[name]
    assert (run.batch_size, run.accumulate, run.seq_len, run.seed) == (batch, accumulate, 4096, seed)
    schedule = run.schedule
    assert (schedule.kind, schedule.tail, schedule.peak, schedule.minimum, schedule.warmup) == (
        "wsd",
        "1-sqrt",
        peak,
        minimum,
        warmup,
    )
    assert schedule.steady_end is None and run.steps * 9 // 10 == steady
    assert (run.dtype, run.mesh.expert, run.optimizer.clip_norm, run.optimizer.weight_decay) == ("bfloat16", 8, 1.0, 0.1)
    assert (run.moe.aux_loss_coef, run.moe.bias_update_rate, run.moe.orthogonal_coef) == (1e-5, 1e-3, orthogonal)
    assert (run.mtp_blocks, run.loss.mtp_weight, run.compute.mtp) == (1, 0.3, True)
    assert run.model.initializer_range == pytest.approx((0.3333 / run.model.hidden_size) ** 0.5, rel=1e-12)


def test_batches_divide_over_the_published_clusters():
    run = run_config_from(recipe("ernie_4_5_21b_a3b_pretrain"))
    assert run.batch_size // run.accumulate // 8 == 2
    run = run_config_from(recipe("ernie_4_5_300b_a47b_pretrain"))
    assert run.batch_size // run.accumulate == 2016 // run.mesh.tensor


def test_quickstart_fits_eight_devices_and_scales_with_its_steps():
    config = recipe("quickstart")
    run = run_config_from(config)
    assert run.model == preset("quickstart") and run.data.kind == "standard_library"
    assert (run.mesh.data, run.mesh.tensor, run.mesh.expert) == (2, 2, 2)
    config.steps = 20
    short = run_config_from(config)
    assert 0 < short.schedule.warmup < short.schedule.steady_end < 20
