"""Generation from images and videos: against full forward passes, batches against single rows, meshes against one device."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from ernie_jax import config_from_hf, load_pretrained
from ernie_jax.data.vision import VisionPatches
from ernie_jax.models import init_model
from ernie_jax.serve import MultimodalPrompt, generate_tokens
from ernie_jax.serve.generate import _generate
from ernie_jax.sharding import make_layout, make_mesh
from ernie_jax.testing import tiny_moe

NO_STOP = [-1]
NEW = 5
TEXT = [5, 9, 33]
# Every full pass is padded on the right to this many tokens: one program for all.
LENGTH = 40


@pytest.fixture(scope="module")
def folder(request):
    return request.path.parent.parent / "golden" / "vl"


@pytest.fixture(scope="module")
def io(folder):
    return load_file(folder / "io.safetensors")


@pytest.fixture(scope="module")
def config(folder):
    """The golden shape, with weights so large that every token of an answer depends on all that stands before it."""
    return replace(config_from_hf(folder), initializer_range=0.2, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def model(config):
    return init_model(config, seed=4)


def prompt_of(io, row, *patches):
    valid = io["attention_mask"][row] != 0
    return MultimodalPrompt(
        *(io[key][row][valid] for key in ("input_ids", "mm_token_type_ids", "moe_mm_token_type_ids")), patches=patches
    )


@pytest.fixture(scope="module")
def image_and_video(io):
    """An image of 4x6 patches and a video of four frames of 4x4."""
    image = VisionPatches(io["pixel_values"][:24], (1, 4, 6), "image")
    return prompt_of(io, 0, image, VisionPatches(io["pixel_values_videos"], (4, 4, 4), "video"))


@pytest.fixture(scope="module")
def image(io):
    """An image of 6x4 patches."""
    return prompt_of(io, 1, VisionPatches(io["pixel_values"][24:], (1, 6, 4), "image"))


@pytest.fixture(scope="module")
def alone(model, image_and_video, image):
    """What each prompt gives in a batch of its own."""
    return [tokens(model, [prompt])[0] for prompt in (image, TEXT, image_and_video)]


def tokens(model, prompts, new=NEW):
    return [c.token_ids for c in generate_tokens(model, prompts, max_new_tokens=new, stop_token_ids=NO_STOP)]


def by_full_passes(model, prompt, positions, new=NEW):
    """Greedy tokens of repeated passes over everything, given the prompt's positions [3, T]."""
    ids, count = list(prompt.input_ids), len(prompt.input_ids)
    # All axes go on behind the largest position of any.
    positions = np.concatenate(
        [positions, np.broadcast_to(positions.max() + 1 + np.arange(LENGTH - count), (3, LENGTH - count))], 1
    )
    media = {}
    for kind, pixels, grid in (("image", "pixel_values", "image_grid_thw"), ("video", "pixel_values_videos", "video_grid_thw")):
        own = [patches for patches in prompt.patches if patches.kind == kind]
        if own:
            media[pixels] = np.concatenate([patches.pixel_values for patches in own])
            media[grid] = np.array([patches.grid_thw for patches in own])
    padded = {
        name: np.pad(getattr(prompt, name), (0, LENGTH - count))[None] for name in ("mm_token_type_ids", "moe_mm_token_type_ids")
    }
    for _ in range(new):
        given = np.array([ids + [0] * (LENGTH - len(ids))])
        logits = model(given, position_ids=positions[:, None], **media, **padded).logits[0, len(ids) - 1]
        ids.append(int(logits.argmax()))
    return ids[count:]


def test_greedy_equals_argmax_of_full_passes(model, folder, io, image_and_video, image, alone):
    # The reference's own positions of the two prompts.
    first, second = io["position_ids"][:, 0], io["position_ids"][:, 1][:, io["attention_mask"][1] != 0]
    assert by_full_passes(model, image_and_video, first) == alone[2]
    assert by_full_passes(model, image, second) == alone[0]
    published = load_pretrained(folder)
    assert by_full_passes(published, image, second) == tokens(published, [image])[0]


def test_tokens_of_transformers(model, image_and_video, image):
    """Tokens that transformers 5.24's `generate` gives for this model (exported) and these prompts, left-padded to one batch."""
    assert tokens(model, [image_and_video, image], new=12) == [
        [105, 36, 35, 81, 15, 69, 24, 87, 8, 81, 127, 81],
        [105, 50, 115, 0, 60, 77, 70, 39, 123, 21, 22, 15],
    ]


def test_rows_of_a_mixed_batch_equal_each_alone(model, image_and_video, image, alone):
    """Case 23: an image, text, and images of other sizes; together, after others, and in another order."""
    assert tokens(model, [image, TEXT, image_and_video]) == alone
    assert tokens(model, [image_and_video, image, TEXT]) == [alone[2], alone[0], alone[1]]
    assert tokens(model, [TEXT, image]) == [alone[1], alone[0]]
    assert tokens(model, [image])[0] == alone[0]
    assert tokens(model, [TEXT])[0] == alone[1]


@pytest.mark.parametrize("sizes", [{"data": 2, "tensor": 2}, {"data": 4}], ids=str)
def test_on_a_mesh(config, image_and_video, sizes, alone):
    """Two rows on two batch shards, each beside its images, and on four, where a row has no shard of its own."""
    mesh = make_mesh(**sizes, devices=jax.devices()[:4])
    placed = init_model(config, layout=make_layout(mesh, config, "serve"), seed=4)
    assert tokens(placed, [TEXT, image_and_video]) == alone[1:]


@pytest.mark.parametrize(("advance", "after"), [("reference", (4, 5, 6)), ("original", (8, 9, 10))])
def test_a_long_video(config, advance, after):
    """Twelve frames of 4x4: text behind them goes on at 4 by the side, at 8 by the time; an answer behind the largest of all."""
    model = init_model(replace(config, vision=replace(config.vision, position_advance=advance)), seed=4)
    pixels = np.random.default_rng(3).normal(size=(12 * 16, 48)).astype(np.float32)
    types = np.array([0, 0, *[2] * 24, 0, 0, 0])
    prompt = MultimodalPrompt([5, 6, *[123] * 24, 9, 10, 11], types, types, (VisionPatches(pixels, (12, 4, 4), "video"),))
    text = np.broadcast_to([0, 1, *[0] * 24, *after], (3, 29)).copy()
    text[:, 2:26] = 2 + np.indices((6, 2, 2)).reshape(3, -1)
    assert text.max() + 1 == {"reference": 8, "original": 11}[advance]
    assert tokens(model, [prompt])[0] == by_full_passes(model, prompt, text)


def test_text_does_not_touch_the_vision_parts(model, alone):
    graphdef, state = nnx.split(model)

    def poison(path, value):
        names = "/".join(str(getattr(key, "key", key)) for key in path)
        return jnp.full_like(value, jnp.nan) if "vision" in names or "resampler" in names else value

    poisoned = nnx.merge(graphdef, jax.tree_util.tree_map_with_path(poison, state))
    assert tokens(poisoned, [TEXT])[0] == alone[1]
    # Token types without images: a prompt of a chat that has none.
    assert tokens(poisoned, [MultimodalPrompt(TEXT, [0, 0, 0], [0, 0, 0])])[0] == alone[1]


def test_images_of_similar_sizes_share_a_program(model):
    def prompt(*grid):
        count = grid[0] * grid[1] // 4
        pixels = np.random.default_rng(0).normal(size=(grid[0] * grid[1], 48)).astype(np.float32)
        placed = np.array([0, 0, *[1] * count, 0])
        routed = np.array([0, 1, *[1] * count, 1])
        return MultimodalPrompt([5, 121, *[120] * count, 122], placed, routed, (VisionPatches(pixels, (1, *grid), "image"),))

    tokens(model, [prompt(4, 10)])
    before = _generate._cache_size()
    # Another shape, and nine token rows, which have the places of ten.
    tokens(model, [prompt(10, 4)])
    tokens(model, [prompt(6, 6)])
    assert _generate._cache_size() == before


def changed(**changes):
    return lambda prompt: replace(prompt, **changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(patches=()), "prompt 1 has 6 placeholders of images and videos, but no patches"),
        (
            changed(mm_token_type_ids=[0] * 12),
            r"prompt 1: the tokens have placeholders for no images, patches are given of \['image'",
        ),
        (changed(mm_token_type_ids=[0] * 5), r"prompt 1: mm_token_type_ids has shape \(5,\); expected \(12,\)"),
        (changed(moe_mm_token_type_ids=[3] * 12), r"prompt 1: moe_mm_token_type_ids spans 3\.\.3"),
        (lambda p: replace(p, patches=p.patches * 2), r"for \['image'\], patches are given of \['image', 'image'\]"),
        (
            lambda p: replace(p, patches=(VisionPatches(np.zeros((32, 48), np.float32), (1, 4, 8), "image"),)),
            r"prompt 1: image or video 0 with grid \(1, 4, 8\) takes 8 tokens, the stream has 6 placeholders",
        ),
        (
            lambda p: replace(p, patches=(VisionPatches(np.zeros((24, 48), np.float32), (2, 3, 4), "video"),)),
            r"for \['image'\], patches are given of \['video'\]",
        ),
        (
            lambda p: replace(p, patches=(VisionPatches(np.zeros((24, 588), np.float32), (1, 6, 4), "image"),)),
            r"image 0 has patches of 588 values; this model takes 48 \(3 channels x 4 x 4\)",
        ),
        (
            lambda p: replace(p, patches=(VisionPatches(np.zeros((24, 48), np.float32), (1, 8, 3), "image"),)),
            r"prompt 1: grid \(1, 8, 3\): height and width must be multiples",
        ),
    ],
)
def test_what_does_not_fit_is_refused(model, image, change, message):
    before = _generate._cache_size()
    with pytest.raises(ValueError, match=message):
        generate_tokens(model, [TEXT, change(image)], max_new_tokens=2)
    assert _generate._cache_size() == before


def test_images_in_the_wrong_order_are_refused(model, image_and_video):
    with pytest.raises(ValueError, match=r"for \['image', 'video'\], patches are given of \['video', 'image'\]"):
        generate_tokens(model, [replace(image_and_video, patches=image_and_video.patches[::-1])])


def test_a_text_model_takes_no_images(image):
    with pytest.raises(ValueError, match="prompt 0 has images or videos, and this is a text model"):
        generate_tokens(init_model(tiny_moe(vocab_size=128)), [image])
