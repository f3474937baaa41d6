from dataclasses import FrozenInstanceError, replace

import pytest

from ernie_jax.config import MoEConfig, VisionConfig, preset

MOE = MoEConfig(num_experts=8, num_experts_per_tok=2, intermediate_size=16)


@pytest.mark.parametrize(
    ("start", "end", "interval", "moe_layers"),
    [
        (0, -1, 1, [0, 1, 2, 3, 4, 5]),
        (1, -1, 1, [1, 2, 3, 4, 5]),
        (2, 3, 1, [2, 3]),
        (0, -1, 2, [1, 3, 5]),
        (1, 4, 3, [2]),
        (2, 5, 3, [2, 5]),
    ],
)
def test_layer_kinds_follow_start_end_and_interval(start, end, interval, moe_layers):
    config = replace(
        preset("quickstart"), num_hidden_layers=6, moe=replace(MOE, layer_start=start, layer_end=end, layer_interval=interval)
    )
    assert [i for i, kind in enumerate(config.layer_kinds) if kind == "moe"] == moe_layers
    assert config.num_moe_layers == len(moe_layers)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, r"num_attention_heads=8 is not a multiple of num_key_value_heads=3"),
        ({"head_dim": 33}, r"head_dim=33; rotary"),
        ({"hidden_size": 0}, r"'hidden_size': 0"),
        ({"vocab_size": True}, r"'vocab_size': True"),
        ({"hidden_act": "swish"}, r"hidden_act='swish'; expected one of"),
        ({"mrope_section": (6, 6, 6)}, r"head_dim / 2 = 16"),
        ({"vision": VisionConfig()}, r"needs moe\.vision_intermediate_size"),
        ({"num_hidden_layers": 1}, r"layer_start=1.*below num_hidden_layers=1"),
    ],
)
def test_bad_shapes_are_refused_with_their_numbers(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(preset("quickstart"), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok=9 is more than num_experts=8"),
        ({"num_shared_experts": -1}, r"num_shared_experts=-1"),
        ({"layer_end": -2}, r"layer_end=-2"),
    ],
)
def test_bad_experts_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(MOE, **changes)


@pytest.mark.parametrize(
    ("changes", "message"), [({"num_heads": 7}, "num_heads=7"), ({"temporal_merge_size": 1}, "temporal_merge_size=1; expected 2")]
)
def test_bad_vision_towers_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        VisionConfig(**changes)


def test_configurations_are_frozen():
    with pytest.raises(FrozenInstanceError):
        preset("quickstart").hidden_size = 1
