import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from ernie_jax.config.pipeline import PipelineConfig
from ernie_jax.config.run import DataConfig, EvalConfig
from ernie_jax.parallel.pipeline import make_timetable, simulate
from ernie_jax.testing import tiny_moe
from ernie_jax.train import train
from ernie_jax.train.pipeline_plot import plot_timetable, timetable_figure


def found_of(schedule, virtual=1, microbatches=4):
    return simulate(make_timetable(schedule, stages=2, microbatches=microbatches, virtual_stages=virtual), 1 / virtual, 2 / virtual)


def bars(axes):
    """(left, right, row) of every bar of work, without those behind that show when a stage waits."""
    boxes = [(p.get_x(), p.get_x() + p.get_width(), round(p.get_y() + p.get_height() / 2)) for p in axes.patches]
    return boxes[2:]


def test_every_piece_of_work_stands_where_the_simulator_has_it():
    found = found_of("1f1b")
    axes = timetable_figure({"1f1b": found}).axes[0]
    np.testing.assert_allclose(sorted(bars(axes)), sorted((s.start, s.end, s.stage) for s in found.spans))
    # Two stages, four microbatches, forward 1 and backward 2: 15 units, of which each stage works 12.
    assert "bubble 20.0%" in axes.get_title()
    assert sorted(text.get_text() for text in axes.texts) == sorted("0123" * 4)
    colours = {tuple(np.round(p.get_facecolor(), 3)) for p in axes.patches}
    assert len(colours) == 3


def test_chunks_have_shades_and_panels_one_scale_of_time():
    figure = timetable_figure({"gpipe": found_of("gpipe"), "interleaved": found_of("interleaved", 2)})
    whole, chunked = figure.axes
    assert whole.get_xlim() == chunked.get_xlim()
    assert len({tuple(p.get_facecolor()) for p in chunked.patches}) == 5
    assert chunked.get_title().startswith("interleaved: bubble 11.1%")


def test_the_picture_is_written_and_shows_idle_time(tmp_path):
    path = plot_timetable({"gpipe": found_of("gpipe")}, tmp_path / "made" / "pipeline.png", title="a run")
    pixels = imread(path)[..., :3]
    idle = np.abs(pixels - np.array(to_rgb("#d9d9d9"))).max(-1) < 0.01
    assert path.parent.is_dir() and 0.01 < idle.mean() < 0.3


def test_work_too_narrow_for_a_number_has_none():
    assert not timetable_figure({"gpipe": found_of("gpipe", microbatches=200)}).axes[0].texts


def test_nothing_to_draw_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no schedule to draw"):
        plot_timetable({}, tmp_path / "none.png")


def test_a_run_with_stages_draws_its_schedule(tiny_run, tmp_path):
    run = tiny_run(
        model=tiny_moe(vocab_size=300, num_experts_per_tok=2),
        steps=1,
        mesh={"pipeline": 2, "data": 4},
        pipeline=PipelineConfig(microbatches=2),
        data=DataConfig(kind="standard_library", max_bytes=300_000),
        eval=EvalConfig(batches=1),
        moe={"balance_scope": "microbatch"},
    )
    lines = []
    train(run, tmp_path, say=lines.append)
    assert imread(tmp_path / "plots" / "pipeline.png").shape[2] >= 3
    # One stage of two waits for one microbatch at the beginning, the other at the end.
    assert "1f1b, 2 stages x 1 with 1 1 layer units, 2 microbatches: bubble 33%" in lines[0]
