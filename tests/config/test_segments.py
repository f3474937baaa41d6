from dataclasses import replace

import pytest

from ernie_jax.config import MoEConfig, Segment, preset, segments_of


def config_of(layers, **moe):
    return replace(
        preset("quickstart"),
        num_hidden_layers=layers,
        moe=MoEConfig(num_experts=4, num_experts_per_tok=2, intermediate_size=8, **moe) if moe else None,
    )


@pytest.mark.parametrize(
    ("config", "segments"),
    [
        (config_of(5), (Segment(0, ("dense",), 5),)),
        (preset("ernie-4.5-300b-a47b"), (Segment(0, ("dense",), 3), Segment(3, ("moe",), 51))),
        (config_of(6, layer_interval=2), (Segment(0, ("dense", "moe"), 3),)),
        (config_of(6, layer_start=2, layer_end=3), (Segment(0, ("dense",), 2), Segment(2, ("moe",), 2), Segment(4, ("dense",), 2))),
    ],
)
def test_segments(config, segments):
    assert segments_of(config) == segments


@pytest.mark.parametrize("interval", [1, 2, 3, 4])
@pytest.mark.parametrize("start", [0, 1, 3])
@pytest.mark.parametrize("end", [-1, 6])
def test_segments_cover_every_layer_once_with_its_kind(start, end, interval):
    config = config_of(9, layer_start=start, layer_end=end, layer_interval=interval)
    covered = {}
    for segment in segments_of(config):
        for repeat in range(segment.repeats):
            for position, kind in enumerate(segment.unit):
                index = segment.layer_index(repeat, position)
                assert index not in covered
                covered[index] = kind
    assert tuple(covered[i] for i in range(9)) == config.layer_kinds
