"""The vision-language model against the reference outputs: features, positions, router scores, logits. S, M: device groups."""

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from ernie_jax import load_pretrained
from ernie_jax.config import PRESETS, count_parameters
from ernie_jax.models import abstract_model
from ernie_jax.nn.kv_cache import KVCache
from ernie_jax.sharding import make_mesh

PUBLISHED = {
    "ernie-4.5-0.3b": 360_748_032,
    "ernie-4.5-21b-a3b": 21_825_437_888,
    "ernie-4.5-300b-a47b": 299_484_163_264,
    "ernie-4.5-vl-28b-a3b": 29_399_294_336,
    "ernie-4.5-vl-424b-a47b": 423_526_285_184,
}
KEYS = ("attention_mask", "mm_token_type_ids", "pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_by_shape_evaluation(name):
    total = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(abstract_model(PRESETS[name]))))
    assert total == count_parameters(PRESETS[name]).total == PUBLISHED[name]


@pytest.fixture(scope="module")
def golden(request):
    return request.path.parent.parent / "golden" / "vl"


@pytest.fixture(scope="module")
def io(golden):
    return load_file(golden / "io.safetensors")


@pytest.fixture(scope="module")
def model(golden):
    return load_pretrained(golden)


def inputs(io, **changes):
    return {key: io[key] for key in KEYS} | {"moe_mm_token_type_ids": io["moe_mm_token_type_ids"]} | changes


def masked(io, logits):
    return np.asarray(logits) * io["attention_mask"][..., None]


def test_image_and_video_features(model, io):
    tower, embeds = model.image_features(io["pixel_values"], io["image_grid_thw"])
    np.testing.assert_allclose(tower, io["vision_tower_image"], atol=1e-4)
    np.testing.assert_allclose(embeds, io["image_embeds"], atol=1e-4)
    _, embeds = model.image_features(io["pixel_values_videos"], io["video_grid_thw"])
    np.testing.assert_allclose(embeds, io["video_embeds"], atol=1e-4)


def test_logits_hidden_states_and_router_scores(model, io):
    out = model(io["input_ids"], **inputs(io), output_hidden_states=True)
    np.testing.assert_allclose(masked(io, out.logits), io["logits"], atol=1e-4)
    for i, hidden in enumerate(out.hidden_states):
        np.testing.assert_allclose(masked(io, hidden), io[f"hidden_{i}"], atol=1e-4)
    valid = io["attention_mask"].reshape(-1) != 0
    assert len(out.router) == 3
    for i, router in enumerate(out.router):
        np.testing.assert_allclose(np.asarray(router.logits).reshape(-1, 8)[valid], io[f"router_{i}"][valid], atol=1e-4)


def test_token_types_can_be_told_from_the_ids(model, io):
    given = inputs(io)
    del given["mm_token_type_ids"]
    np.testing.assert_allclose(masked(io, model(io["input_ids"], **given).logits), io["logits"], atol=1e-4)


def test_without_routing_types_all_tokens_go_to_the_text_experts(model, io, caplog):
    out = model(io["input_ids"], **inputs(io, moe_mm_token_type_ids=None))
    np.testing.assert_allclose(masked(io, out.logits), io["logits_no_moe_types"], atol=1e-4)
    assert "image tokens go to the text experts" in caplog.text


def test_text_alone_and_given_positions(model, io):
    np.testing.assert_allclose(model(io["text_input_ids"]).logits, io["text_logits"], atol=1e-4)
    out = model(io["input_ids"], **inputs(io), position_ids=io["position_ids"])
    np.testing.assert_allclose(masked(io, out.logits), io["logits"], atol=1e-4)


@pytest.mark.parametrize(
    "sizes", [{"data": 2}, {"tensor": 2}, {"data": 4}, {"data": 2, "tensor": 2, "expert": 2}, {"expert": 8}], ids=str
)
def test_logits_on_a_mesh(golden, io, sizes):
    """Two rows on 1, 2, 4 and 8 batch shards: images in their rows' groups where rows divide, anywhere where they do not."""
    mesh = make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])
    out = load_pretrained(golden, mesh=mesh)(io["input_ids"], **inputs(io))
    np.testing.assert_allclose(masked(io, out.logits), io["logits"], atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_grid_thw": None}, "pixel_values is given without image_grid_thw"),
        ({"image_grid_thw": np.array([[1, 4, 6]])}, r"covers 24 patches, pixel_values has shape \(48, 48\)"),
        ({"image_grid_thw": np.array([[1, 4, 6], [1, 3, 8]])}, r"grid \(1, 3, 8\): height and width must be multiples"),
        ({"image_grid_thw": np.array([[1, 6, 4], [1, 4, 6]])}, None),
        ({"image_grid_thw": np.array([[1, 8, 4], [1, 4, 4]])}, "takes 8 tokens, the stream has 6 placeholders"),
        ({"pixel_values": None, "image_grid_thw": None}, "placeholders for 2 images, image_grid_thw has 0 rows"),
        ({"mm_token_type_ids": np.zeros((2, 3), int)}, r"mm_token_type_ids has shape \(2, 3\); expected \(2, 24\)"),
        ({"moe_mm_token_type_ids": np.full((2, 24), 3)}, "spans 3..3; expected 0"),
        ({"position_ids": np.zeros((2, 2, 24), int)}, r"position_ids has shape \(2, 2, 24\)"),
        ({"position_ids": np.zeros((3, 2, 24))}, "position_ids has dtype float64; expected integers"),
    ],
)
def test_what_does_not_fit_is_refused(model, io, change, message):
    if message is None:
        # Another shape with as many tokens is another picture, not an error.
        assert not np.allclose(masked(io, model(io["input_ids"], **inputs(io, **change)).logits), io["logits"], atol=1e-2)
        return
    with pytest.raises(ValueError, match=message):
        model(io["input_ids"], **inputs(io, **change))


def test_images_without_placeholders_are_refused(model, io):
    with pytest.raises(ValueError, match="1 images are given, but input_ids have no image placeholders"):
        model(io["text_input_ids"], pixel_values=io["pixel_values"][:24], image_grid_thw=io["image_grid_thw"][:1])


def test_text_behind_images_in_a_cache_goes_on_at_their_positions(model, io):
    """Images take fewer positions than tokens; without the offset logits are off by whole units."""
    both = ("attention_mask", "mm_token_type_ids", "moe_mm_token_type_ids")
    given, next_ids = inputs(io), np.array([[5], [9]])
    longer = {key: np.concatenate([given[key], np.full((2, 1), key == "attention_mask")], 1) for key in both}
    whole = model(np.concatenate([io["input_ids"], next_ids], 1), **given | longer).logits[:, -1]
    cache = model(io["input_ids"], **given, cache=KVCache.create(model.config, 2, 26, np.float32)).cache
    first = model(next_ids, cache=cache)
    np.testing.assert_allclose(first.logits[:, 0], whole, atol=1e-4)
    # A second step goes on from the first.
    given_positions = io["position_ids"].max(axis=(0, 2))[:, None] + 2
    told = model(next_ids, position_ids=given_positions, cache=first.cache).logits
    np.testing.assert_allclose(model(next_ids, cache=first.cache).logits, told, atol=1e-5)


def test_lists_are_taken_like_arrays(model, io):
    lists = {key: value.tolist() for key, value in inputs(io).items()}
    out = model(io["input_ids"].tolist(), **lists, position_ids=io["position_ids"].tolist())
    np.testing.assert_allclose(masked(io, out.logits), io["logits"], atol=1e-4)
    features, _ = model.image_features(io["pixel_values"].tolist(), io["image_grid_thw"].tolist())
    np.testing.assert_allclose(features, io["vision_tower_image"], atol=1e-4)


def test_image_features_of_patches_of_another_width_are_refused(model, io):
    with pytest.raises(ValueError, match=r"covers 48 patches, pixel_values has \(48, 10\), not \[48, 48\]"):
        model.image_features(io["pixel_values"][:, :10], io["image_grid_thw"])
