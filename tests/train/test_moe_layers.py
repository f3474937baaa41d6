import numpy as np
import pytest

from ernie_jax.testing import tiny_moe
from ernie_jax.train.moe_layers import from_stacks, moe_stacks, to_stacks


@pytest.mark.parametrize(
    ("shape", "stacks"),
    [
        ({"num_hidden_layers": 3, "layer_start": 1}, {"decoder/segments/1/layers/0/moe": (0, 1)}),
        ({"num_hidden_layers": 6, "layer_start": 0, "layer_interval": 2}, {"decoder/segments/0/layers/1/moe": (0, 1, 2)}),
        ({"num_hidden_layers": 5, "layer_start": 1, "layer_end": 2}, {"decoder/segments/1/layers/0/moe": (0, 1)}),
    ],
)
def test_stacks_name_each_moe_layer_once(shape, stacks):
    assert {s.path: s.layers for s in moe_stacks(tiny_moe(**shape))} == stacks


def test_layer_order_survives_the_way_into_stacks_and_back():
    config = tiny_moe(num_hidden_layers=7, layer_start=1, layer_interval=3)
    by_layer = np.arange(config.num_moe_layers * 2.0).reshape(-1, 2)
    assert config.num_moe_layers == 2
    by_path = to_stacks(config, "router/bias", by_layer)
    assert sum(len(v) for v in by_path.values()) == 2
    np.testing.assert_array_equal(from_stacks(config, "router/bias", by_path), by_layer)
