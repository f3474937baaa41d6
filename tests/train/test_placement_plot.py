import numpy as np
from matplotlib.image import imread

from ernie_jax.train.placement_plot import plot_placement


def test_a_picture_of_both_kinds_of_experts_one_of_them_idle(tmp_path):
    before, after = np.array([[8.0, 2.0], [1.0, 3.0]]), np.array([[5.0, 5.0], [2.0, 2.0]])
    idle = np.zeros((2, 2))
    one = imread(plot_placement({"text experts": (before, after)}, tmp_path / "plots" / "one.png", title="moved"))
    two = imread(plot_placement({"text experts": (before, after), "vision experts": (idle, idle)}, tmp_path / "two.png"))
    assert np.ptp(one) > 0.5 and two.shape[0] > one.shape[0] and two.shape[1] == one.shape[1]
