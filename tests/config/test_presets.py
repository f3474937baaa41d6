import pytest

from ernie_jax.config import PRESETS, preset

# hidden, head_dim, layers, dense layers, (experts, chosen, width, shared, vision width), tied, MTP blocks
PUBLISHED = {
    "ernie-4.5-0.3b": (1024, 128, 18, 18, None, True, 0),
    "ernie-4.5-21b-a3b": (2560, 128, 28, 1, (64, 6, 1536, 2, None), True, 1),
    "ernie-4.5-300b-a47b": (8192, 128, 54, 3, (64, 8, 3584, 0, None), False, 1),
    "ernie-4.5-vl-28b-a3b": (2560, 128, 28, 1, (64, 6, 1536, 2, 512), True, 0),
    "ernie-4.5-vl-424b-a47b": (8192, 128, 54, 3, (64, 8, 3584, 0, 1536), False, 0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    hidden, head_dim, layers, dense, moe, tied, mtp = PUBLISHED[name]
    config = preset(name)
    assert (config.vocab_size, config.rope_theta, config.rms_norm_eps, config.max_position_embeddings) == (
        103424,
        5e5,
        1e-5,
        131072,
    )
    assert (config.hidden_size, config.head_dim, config.tie_word_embeddings) == (hidden, head_dim, tied)
    assert config.layer_kinds == ("dense",) * dense + ("moe",) * (layers - dense)
    assert config.num_nextn_predict_layers == mtp
    if moe is None:
        assert config.moe is None
        # The one size whose heads are wider together than the model.
        assert config.num_attention_heads * config.head_dim == 2 * hidden
    else:
        got = config.moe
        assert moe == (
            got.num_experts,
            got.num_experts_per_tok,
            got.intermediate_size,
            got.num_shared_experts,
            got.vision_intermediate_size,
        )
    assert (config.vision is not None) == ("-vl-" in name)
    assert config.mrope_section == ((22, 22, 20) if "-vl-" in name else None)


def test_quickstart_has_every_part_and_divides_over_its_meshes():
    config = preset("quickstart")
    assert config.moe is not None
    assert config.layer_kinds[0] == "dense" and set(config.layer_kinds[1:]) == {"moe"}
    assert config.num_key_value_heads < config.num_attention_heads and config.moe.num_shared_experts > 0
    for size in (
        config.vocab_size,
        config.num_key_value_heads,
        config.intermediate_size,
        config.moe.intermediate_size,
        config.moe.shared_intermediate_size,
    ):
        assert size % 2 == 0
    assert config.moe.num_experts % 8 == 0


def test_unknown_name_gives_the_nearest_and_the_list():
    with pytest.raises(ValueError, match=r"'ernie-4\.5-21b-a3'.*did you mean 'ernie-4\.5-21b-a3b'") as error:
        preset("ernie-4.5-21b-a3")
    assert all(name in str(error.value) for name in PRESETS)
