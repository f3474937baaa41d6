import dataclasses
import json
import math

import jax
import pytest
from flax import nnx

from ernie_jax.config import config_from_hf, count_parameters, preset
from ernie_jax.models import abstract_model

# total without MTP, active, MTP
PUBLISHED = {
    "ernie-4.5-0.3b": (360_748_032, 360_748_032, 0),
    "ernie-4.5-21b-a3b": (21_825_437_888, 3_352_150_208, 123_217_920),
    "ernie-4.5-300b-a47b": (299_484_163_264, 47_926_586_560, 989_888_512),
    "ernie-4.5-vl-28b-a3b": (29_399_294_336, 3_352_150_208, 0),
    "ernie-4.5-vl-424b-a47b": (423_526_285_184, 47_926_586_560, 0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts_to_the_last_digit(name):
    count = count_parameters(preset(name))
    assert (count.total, count.active, count.mtp) == PUBLISHED[name]


def test_published_300b_label_includes_mtp():
    count = count_parameters(preset("ernie-4.5-300b-a47b"))
    assert count.total + count.mtp == 300_474_051_776


def test_vision_language_model_is_text_model_plus_vision_parts():
    vision_tower, resampler = 630_433_280, 144_225_280
    whole = count_parameters(preset("ernie-4.5-vl-28b-a3b")).total
    assert whole - vision_tower - resampler == 28_624_635_776
    text = count_parameters(preset("ernie-4.5-21b-a3b")).total
    # 27 layers of 64 narrow experts, each with its own gate and bias.
    assert 28_624_635_776 - text == 27 * (64 * 2560 + 64 + 64 * 3 * 2560 * 512)


@pytest.mark.parametrize("name", ["dense", "moe", "moe_noshared", "vl"])
def test_counts_equal_the_tensors_of_a_checkpoint(golden, name):
    shapes = json.loads((golden / name / "shapes.json").read_text())["hub"]
    assert count_parameters(config_from_hf(golden / name)).total == sum(math.prod(shape) for shape in shapes.values())


@pytest.mark.parametrize("name", ["ernie-4.5-0.3b", "ernie-4.5-21b-a3b", "ernie-4.5-300b-a47b", "quickstart"])
def test_counts_equal_the_arrays_of_the_model(name):
    shapes = jax.tree.leaves(nnx.state(abstract_model(preset(name))))
    assert count_parameters(preset(name)).total == sum(math.prod(leaf.shape) for leaf in shapes)


def test_active_leaves_out_exactly_the_experts_not_chosen():
    config = preset("quickstart")
    count = count_parameters(config)
    assert 5e6 < count.total < 15e6
    # 3 MoE layers, 14 of 16 experts idle, 3 matrices of 256 x 128.
    assert count.total - count.active == 3 * 14 * 3 * 256 * 128
    assert count.embedding == 2048 * 256
    untied = count_parameters(dataclasses.replace(config, tie_word_embeddings=False))
    assert untied.embedding == 2 * count.embedding and untied.total - count.total == count.embedding
