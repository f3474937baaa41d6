import numpy as np
import pytest
from matplotlib.image import imread

from ernie_jax.train.plots import plot_run


def records(moe):
    router = {"load": [[8.0, 0.0], [4.0, 4.0]]} if moe else {}
    lines = [{"step": s, "loss": None if s == 2 else 5.0 / s, "router": router} for s in (1, 2, 3)]
    lines[-1]["eval_loss"] = 2.0
    return lines


@pytest.mark.parametrize("moe", [True, False])
def test_a_picture_is_drawn_with_and_without_experts(moe, tmp_path):
    path = plot_run(records(moe), tmp_path / "plots" / "run.png", unigram_entropy=4.0, title="run")
    image = imread(path)
    assert image.shape[1] > image.shape[0] and np.ptp(image) > 0.5


def test_nothing_to_plot_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="log_every"):
        plot_run([], tmp_path / "run.png")
