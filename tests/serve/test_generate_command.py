"""`launch/generate.py` as a user runs it: a question about a picture to a folder with a tokenizer."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import ernie_jax as ej
from ernie_jax.data import train_tokenizer
from ernie_jax.data.chat import MEDIA_TOKENS
from ernie_jax.data.vision import ImageProcessor, VideoProcessor

SCRIPT = Path(__file__).parents[2] / "launch" / "generate.py"
SAMPLE = ["User: what is this?\nAssistant: a cat\n", "Picture 1: a dog, Video 2: birds"] * 40
SIZES = {"patch_size": 4, "merge_size": 2, "min_pixels": 64, "max_pixels": 1024}


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """A vision-language model of random weights, with a tokenizer and settings of its own for images and videos."""
    path = tmp_path_factory.mktemp("model")
    special = ["<|begin_of_sentence|>", "<|end_of_sentence|>", *MEDIA_TOKENS]
    tokenizer = train_tokenizer(SAMPLE, 300, path, special)
    golden = ej.config_from_hf(request.path.parent.parent / "golden" / "vl")
    config = replace(golden, vocab_size=tokenizer.vocab_size, initializer_range=0.2)
    ej.save_pretrained(ej.init_model(config, seed=1), path)
    ImageProcessor(**SIZES).save(path)
    VideoProcessor(**SIZES, num_frames=4, min_frames=2, draw_timestamps=False).save(path)
    return path


def test_a_question_about_an_image_and_a_video(folder, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 20, 30, 3), np.uint8)
    picture, frames = tmp_path / "a.png", [Image.fromarray(frame) for frame in pixels]
    frames[0].save(picture)
    (tmp_path / "frames").mkdir()
    for i, frame in enumerate(frames):
        frame.save(tmp_path / "frames" / f"{i}.png")
    question = ["--image", picture, "--video", tmp_path / "frames", "--prompt", "what?", "--max-new-tokens", "5", "--json"]
    done = subprocess.run([sys.executable, SCRIPT, "--model", folder, *question], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    content = [
        {"type": "image", "image": picture},
        {"type": "video", "video": tmp_path / "frames"},
        {"type": "text", "text": "what?"},
    ]
    expected = ej.chat(
        ej.load_pretrained(folder),
        ej.Tokenizer.from_folder(folder),
        [{"role": "user", "content": content}],
        image_processor=ImageProcessor.from_folder(folder),
        video_processor=VideoProcessor.from_folder(folder),
        max_new_tokens=5,
    )
    assert json.loads(done.stdout.splitlines()[-1])["texts"] == [expected]


def test_images_belong_to_one_prompt(folder):
    command = [sys.executable, SCRIPT, "--model", folder, "--image", "a.png", "--prompt", "a", "--prompt", "b"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "2 prompts beside images or videos, which belong to one" in done.stderr
