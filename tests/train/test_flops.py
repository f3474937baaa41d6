import jax
import pytest

from ernie_jax.config import count_parameters, preset
from ernie_jax.testing import tiny_dense, tiny_moe, tiny_vl
from ernie_jax.train.flops import (
    PEAK_FLOPS,
    ModelCost,
    flops_per_token,
    matmul_parameters,
    patch_parameters,
    peak_flops,
)


def test_only_chosen_and_shared_experts_count():
    # Attention 32 x 8 x (4 + 2 + 2 + 4) a layer; dense MLP 3 x 32 x 48; gate 8 x 32, 2 of 8 experts and 1 shared of width 16; head.
    attention, dense = 32 * 8 * 12, 3 * 32 * 48
    moe = 8 * 32 + 3 * 32 * 16 * (2 + 1)
    assert matmul_parameters(tiny_moe(num_experts_per_tok=2)) == 3 * attention + dense + 2 * moe + 64 * 32


def test_a_token_costs_six_flops_a_weight_and_half_a_row_of_attention():
    config = tiny_dense()
    # Scores and sums: 2 products forward, 4 backward, 2 FLOPs an element, over 2 layers, 4 heads of 16 and 50 tokens on average.
    assert flops_per_token(config, 100) == 6 * matmul_parameters(config) + 12 * 2 * 4 * 16 * 50


def test_a_block_of_multi_token_prediction_costs_a_projection_a_dense_layer_and_a_head():
    config = preset("ernie-4.5-21b-a3b")
    block = 2 * 2560 * 2560 + 2560 * 128 * 2 * (20 + 4) + 3 * 2560 * 12288
    assert block == count_parameters(config).mtp - 4 * 2560
    more = flops_per_token(config, 4096, mtp_blocks=1) - flops_per_token(config, 4096)
    assert more == 6 * (block + 2560 * 103424) + 12 * 20 * 128 * 2048
    assert ModelCost.of(config, 4096, mtp_blocks=1).text_token == flops_per_token(config, 4096) + more


def test_active_weights_of_a_published_model_are_its_active_parameters_less_tables_and_norms():
    config = preset("ernie-4.5-300b-a47b")
    norms = config.hidden_size * (2 * config.num_hidden_layers + 1)
    biases = config.num_moe_layers * config.moe.num_experts
    table = config.vocab_size * config.hidden_size
    assert matmul_parameters(config) == count_parameters(config).active - table - norms - biases


class Device:
    """What `peak_flops` reads of a device that is not at hand."""

    platform = "gpu"

    def __init__(self, kind):
        self.device_kind = kind


@pytest.mark.parametrize(
    ("kind", "flops"),
    [("NVIDIA H100 80GB HBM3", 989.4e12), ("NVIDIA H100 PCIe", 756e12), ("TPU v5p", 459e12), ("TPU v5 lite", 197e12)],
)
def test_the_longest_matching_name_gives_the_peak_of_all_devices(kind, flops):
    assert peak_flops([Device(kind)] * 4).flops == 4 * flops


def test_unknown_devices_have_no_peak_and_say_so():
    peak = peak_flops([Device("NVIDIA Z9")])
    assert peak.flops is None and "Z9" in peak.source
    assert peak_flops([Device("NVIDIA Z9")] * 2, override=1e12).flops == 2e12


def test_the_cpu_peak_is_measured_for_all_fake_devices_together():
    peak = peak_flops(jax.devices())
    assert peak.flops is not None and 1e8 < peak.flops < 1e14
    assert all(value > 1e13 for value in PEAK_FLOPS.values())


def test_an_image_token_goes_through_the_vision_experts_and_a_patch_through_the_tower():
    config = tiny_vl(num_experts_per_tok=2)
    cost = ModelCost.of(config, 100)
    assert cost.text_token == flops_per_token(config, 100)
    # Two MoE layers, 2 chosen experts of 3 x 32 weights a unit of width, 16 wide for text and 8 for vision.
    assert cost.text_token - cost.vision_token == 6 * 2 * 2 * 3 * 32 * (16 - 8)
    # Patches of 12 values; two blocks of qkv, proj (4 x 16 x 16) and MLP (2 x 16 x 32); a quarter of the resampler's row:
    # 64 -> 64 -> 64, 128 -> 64 -> 64, 64 -> 32.
    assert patch_parameters(config) == 12 * 16 + 2 * (4 * 256 + 1024) + (64 * 64 * 5 + 64 * 32) / 4
    record = {"tokens": 10.0, "vision_tokens": 4.0, "patches": 7.0}
    assert cost.step(record) == 6 * cost.text_token + 4 * cost.vision_token + 7 * cost.patch
    assert cost.step({"tokens": 10.0}) == 10 * cost.text_token
