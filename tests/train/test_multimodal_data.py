"""A vision-language run reads conversations and texts: its records tell how evenly images lay, and wrong settings stop it early."""

import dataclasses
import json

import numpy as np
import pytest
from PIL import Image

from ernie_jax.config.run import DataConfig, EvalConfig
from ernie_jax.data import Tokenizer, train_tokenizer
from ernie_jax.data.chat import KINDS, MEDIA_TOKENS, MediaTokens
from ernie_jax.data.vision import ImageProcessor, VideoProcessor
from ernie_jax.testing import tiny_moe, tiny_vl
from ernie_jax.train import train
from ernie_jax.train.records import read_records


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`tokenizer/` with processors, `chats.jsonl` with images, `texts.txt`."""
    root = tmp_path_factory.mktemp("multimodal")
    special = ["<|begin_of_sentence|>", "<|end_of_sentence|>", *MEDIA_TOKENS]
    train_tokenizer(["what is this? Picture 1: a red square\n"] * 20, 300, root / "tokenizer", special)
    vision = tiny_vl().vision
    sizes = {"patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size}
    factor = vision.patch_size * vision.spatial_merge_size
    bounds = {"min_pixels": factor**2, "max_pixels": 6 * factor**2}
    ImageProcessor(**sizes, **bounds).save(root / "tokenizer")
    VideoProcessor(**sizes, **bounds).save(root / "tokenizer")
    rng = np.random.default_rng(0)
    chats = []
    for i in range(12):
        size = factor * rng.integers(1, 4, 2)
        Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(root / f"{i}.png")
        content = [{"type": "image", "image": f"{i}.png"}, {"type": "text", "text": "what?"}]
        chats.append({"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "red"}]})
    (root / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (root / "texts.txt").write_text("what is this? " * 50)
    return root


@pytest.fixture(scope="module")
def make_run(folder, tiny_run):
    def make(data=None, vision=None, **changes):
        tokens = MediaTokens.of(Tokenizer.from_folder(folder / "tokenizer"))
        ids = {f"{name}_token_id": getattr(tokens, name) for name in ("image", "image_start", "image_end")}
        ids |= {f"{name}_token_id": getattr(tokens, name) for name in ("video", "video_start", "video_end")}
        model = tiny_vl(num_hidden_layers=2)
        model = dataclasses.replace(model, vocab_size=320, vision=dataclasses.replace(model.vision, **ids | (vision or {})))
        settings = {
            "kind": "multimodal",
            "paths": (str(folder / "chats.jsonl"),),
            "text_paths": (str(folder / "texts.txt"),),
            "eval_paths": (str(folder / "chats.jsonl"),),
            "tokenizer": str(folder / "tokenizer"),
            "max_patches": 64,
            "text_weight": 0.25,
        }
        defaults = {"model": model, "steps": 3, "batch_size": 8, "seq_len": 64, "log_every": 1, "accumulate": 2}
        mesh = {"data": 2, "expert": 2, "tensor": 2}
        return tiny_run(
            **defaults | {"mesh": mesh, "eval": EvalConfig(batches=1), "data": DataConfig(**settings | (data or {}))} | changes
        )

    return make


def test_a_run_records_how_evenly_the_images_lay(make_run, tmp_path):
    train(make_run(), tmp_path, say=lambda line: None)
    records = read_records(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3]
    for record in records:
        assert 1 <= record["image_imbalance"] <= record["image_imbalance_naive"]
        assert np.isfinite(record["loss"])
    assert records[-1]["eval_loss"] == pytest.approx(records[-1]["eval_loss_multimodal"])


def test_texts_alone_train_a_vision_language_model_too(make_run, tmp_path):
    train(make_run(data={"paths": (), "eval_paths": ()}, steps=1), tmp_path, say=lambda line: None)
    (record,) = read_records(tmp_path / "metrics.jsonl")
    assert (record["image_imbalance"], record["image_imbalance_naive"]) == (1, 1)
    assert np.isfinite(record["loss"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision": {"image_token_id": 7}}, r"image_token_id=7 \(tokenizer \d+\)"),
        ({"vision": {"patch_size": 4}}, "ImageProcessor of .* the model {'patch_size': 4"),
        ({"data": {"kind": "files", "text_paths": ()}}, "use config.data.kind='multimodal', with config.data.text_paths"),
        ({"data": {"paths": ("nowhere/*.jsonl",)}}, "no file matches"),
        ({"data": {"max_patches": 30}}, "multiple of merge_size"),
        ({"data": {"max_pixels": 1}}, "above max_pixels 1"),
    ],
)
def test_settings_that_stop_a_run_before_it_begins(make_run, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train(make_run(**changes), tmp_path, say=lambda line: None)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_conversations_need_a_vision_language_model(make_run, tmp_path):
    with pytest.raises(ValueError, match="is for a vision-language model"):
        train(make_run(model=tiny_moe(vocab_size=320)), tmp_path, say=lambda line: None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"paths": (), "text_paths": ()}, "paths and config.data.text_paths are empty"),
        ({"text_weight": 1.0}, "text_weight=1.0"),
        ({"train_on": "questions"}, "train_on"),
        ({"template": "chat"}, "template"),
        ({"max_patches": 0}, "max_patches=0"),
        ({"tokenizer": None}, "tokenizer is not set"),
        ({"kind": "files"}, "text_paths is for config.data.kind='multimodal'"),
    ],
)
def test_data_settings_that_are_refused(changes, message):
    settings = {"kind": "multimodal", "paths": ("a",), "text_paths": ("b",), "tokenizer": "c"}
    with pytest.raises(ValueError, match=message):
        DataConfig(**settings | changes)


def test_every_built_in_template_can_be_named():
    for kind in KINDS:
        assert DataConfig(kind="multimodal", paths=("a",), tokenizer="b", template=kind).template == kind
