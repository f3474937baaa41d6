"""The time drawn into the corner of a video frame."""

from __future__ import annotations

import functools
import io
import os

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ernie_jax.data.vision.reading import open_file

_SIZE = 0.1  # of the font, to the frame's shorter side; and of the outline, to the font


def format_timestamp(seconds: float) -> str:
    """`time: HH:MM:SS.ss`, rounded to hundredths (the reference writes 60.00 seconds where they round up to a minute)."""
    hundredths = round(seconds * 100)
    minutes, rest = divmod(hundredths, 6000)
    return f"time: {minutes // 60:02d}:{minutes % 60:02d}:{rest // 100:02d}.{rest % 100:02d}"


def draw_timestamp(frame: np.ndarray, seconds: float, font: str | None = None) -> np.ndarray:
    """A copy of the frame with the time in its top-left corner, black with a white outline.

    The font is a tenth of the shorter side high, its outline a tenth of that, as in transformers' video processor.

    Args:
      frame: uint8 [H, W, 3].
      seconds: from the start of the video.
      font: path of a TrueType or OpenType file. None takes the scalable font that Pillow ships. The released models were
        trained with Roboto-Regular.ttf, which their folders hold: give it for the very same pixels.

    Raises:
      ValueError: the frame is too small for any letter, or the font cannot be read.
    """
    size = int(min(frame.shape[:2]) * _SIZE)
    if size < 1:
        raise ValueError(
            f"a frame of {frame.shape[0]}x{frame.shape[1]} pixels is too small for a timestamp; set draw_timestamps=False"
        )
    image = Image.fromarray(frame)
    ImageDraw.Draw(image).text(
        (0, 0),
        format_timestamp(seconds),
        font=load_font(font, size),
        fill=(0, 0, 0),
        stroke_width=int(size * _SIZE),
        stroke_fill=(255, 255, 255),
    )
    return np.array(image)


@functools.lru_cache(maxsize=16)
def load_font(path: str | None, size: int) -> ImageFont.FreeTypeFont:
    """The font at a size in pixels; ValueError where it cannot be read or Pillow was built without FreeType."""
    try:
        if path is not None:
            with open_file(os.fspath(path)) as file:
                return ImageFont.truetype(io.BytesIO(file.read()), size)
        font = ImageFont.load_default(size)
    except ImportError as error:
        raise ValueError("drawing timestamps needs a Pillow with FreeType; its wheels have it: pip install Pillow") from error
    except OSError as error:
        raise ValueError(f"{path} is not a font that FreeType reads: {error}") from error
    assert isinstance(font, ImageFont.FreeTypeFont)
    return font
