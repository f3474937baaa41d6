"""What `chat` needs beside the weights of a checkpoint folder: template, image and video settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ernie_jax.config.model import ModelConfig
from ernie_jax.data.chat import chat_template_of
from ernie_jax.data.vision import ImageProcessor, VideoProcessor


def chat_settings(folder: str | os.PathLike[str], config: ModelConfig, template: str | None = None) -> dict[str, Any]:
    """Keyword arguments of `chat`, read from the folder where it has them.

    Args:
      folder: a checkpoint's.
      config: of its model.
      template: kind of chat template where the folder has none; by default `vl` for a vision-language model, else `text`.

    Raises:
      ValueError: a template or settings that cannot be read.
    """
    folder = Path(folder)
    kind = template or ("text" if config.vision is None else "vl")
    settings: dict[str, Any] = {"template": chat_template_of(folder, kind)}
    if config.vision is None:
        return settings
    for name, processor, own in (
        ("image_processor", ImageProcessor, "preprocessor_config.json"),
        ("video_processor", VideoProcessor, "video_preprocessor_config.json"),
    ):
        # Without a file, `chat` takes the published settings at the model's patch size.
        if any((folder / file).exists() for file in (own, "processor_config.json")):
            settings[name] = processor.from_folder(folder)
    return settings
