"""The vision-language model's parameters, and its tower and resampler against the reference outputs."""

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from ernie_jax.config import PRESETS, config_from_hf, count_parameters
from ernie_jax.models import abstract_model, init_model
from ernie_jax.models.vision_tower import patch_coordinates
from ernie_jax.sharding import map_variables

PUBLISHED = {
    "ernie-4.5-0.3b": 360_748_032,
    "ernie-4.5-21b-a3b": 21_825_437_888,
    "ernie-4.5-300b-a47b": 299_484_163_264,
    "ernie-4.5-vl-28b-a3b": 29_399_294_336,
    "ernie-4.5-vl-424b-a47b": 423_526_285_184,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_by_shape_evaluation(name):
    total = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(abstract_model(PRESETS[name]))))
    assert total == count_parameters(PRESETS[name]).total == PUBLISHED[name]


def hub_value(path, weights, config):
    """A vision weight of the published layout (test-only reading of the names)."""
    merge = {"spatial": "spatial_linear", "temporal": "temporal_linear"}
    parts = path.split("/")
    name = {"kernel": "weight", "scale": "weight", "bias": "bias"}[parts[-1]]
    if parts[0] == "vision_tower":
        if parts[1] == "patch_embed":
            return weights["model.vision_model.patch_embed.proj.weight"].T
        if parts[1] == "norm":
            return weights[f"model.vision_model.ln.{name}"]
        inner = {"qkv": "attn.qkv", "proj": "attn.proj", "fc1": "mlp.fc1", "fc2": "mlp.fc2"}.get(parts[2], parts[2])
        stack = [weights[f"model.vision_model.blocks.{i}.{inner}.{name}"] for i in range(config.vision.depth)]
        return np.stack([w.T if parts[-1] == "kernel" else w for w in stack])
    if parts[1] in merge:
        index = {"fc1": 0, "fc2": 2, "norm": 3}[parts[2]]
        value = weights[f"model.resampler_model.{merge[parts[1]]}.{index}.{name}"]
    else:
        value = weights[f"model.resampler_model.{ {'mlp': 'mlp', 'norm': 'after_norm'}[parts[1]] }.{name}"]
    return value.T if parts[-1] == "kernel" else value


@pytest.fixture(scope="module")
def reference(request):
    folder = request.path.parent.parent / "golden" / "vl"
    config, weights, io = config_from_hf(folder), load_file(folder / "model.safetensors"), load_file(folder / "io.safetensors")
    graphdef, state = nnx.split(init_model(config))

    def change(path, variable):
        vision = path.startswith(("vision_tower", "resampler"))
        value = hub_value(path, weights, config) if vision else variable[...]
        assert value.shape == variable.shape, path
        return value

    return nnx.merge(graphdef, map_variables(change, state)), io


def test_image_features(reference):
    model, io = reference
    tower, embeds = model.image_features(io["pixel_values"], io["image_grid_thw"])
    np.testing.assert_allclose(tower, io["vision_tower_image"], atol=1e-4)
    np.testing.assert_allclose(embeds, io["image_embeds"], atol=1e-4)


def test_video_features(reference):
    model, io = reference
    _, embeds = model.image_features(io["pixel_values_videos"], io["video_grid_thw"])
    np.testing.assert_allclose(embeds, io["video_embeds"], atol=1e-4)


def test_images_in_the_stream_are_refused(reference):
    model, io = reference
    with pytest.raises(ValueError, match=r"placeholders \[120, 123\]; images in the token stream are not supported yet"):
        model(io["input_ids"])


def test_a_grid_that_does_not_fit_is_refused(reference):
    model, io = reference
    with pytest.raises(ValueError, match="covers 24 patches, pixel_values has 48"):
        model.image_features(io["pixel_values"], io["image_grid_thw"][:1])
    with pytest.raises(ValueError, match=r"\(1, 3, 4\).*merge size 2"):
        patch_coordinates(np.array([[1, 3, 4]]), 2)
