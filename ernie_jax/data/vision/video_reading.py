"""A video from a file, an animation, a folder of frames or a list of them."""

from __future__ import annotations

import io
import itertools
import math
import os
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import IO

import numpy as np
from etils import epath
from PIL import Image

from ernie_jax.data.vision.containers import Opener, scan_video
from ernie_jax.data.vision.reading import ImageSource, data_url_bytes, describe, open_file, read_bytes, read_image

VideoSource = str | os.PathLike[str] | bytes | bytearray | memoryview | IO[bytes] | np.ndarray | Sequence[ImageSource]

# Of frames that come without times; what transformers' video processor assumes.
DEFAULT_FRAME_RATE = 24
# Pillow reads these animations; the rest of the world goes through PyAV.
_ANIMATIONS = ("GIF", "PNG", "WEBP")
_STILL = {b"\xff\xd8\xff": "JPEG", b"BM": "BMP", b"II*\x00": "TIFF", b"MM\x00*": "TIFF"}
_SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".gif"))
# Where a GIF gives a frame no time, browsers show it for a tenth of a second.
_DEFAULT_MILLISECONDS = 100


@dataclass(frozen=True)
class Video:
    """A video whose frames are read when asked for.

    Attributes:
      name: names it in messages.
      times: seconds from the start of each frame, ascending; as many as there are frames.
      frame_rate: frames a second, on average.
      read: gives the frames of ascending indices, each uint8 [H, W, 3].
    """

    name: str
    times: Sequence[float]
    frame_rate: Fraction
    read: Callable[[Sequence[int]], Iterator[np.ndarray]]

    @property
    def num_frames(self) -> int:
        """Frames in all."""
        return len(self.times)


def open_video(source: VideoSource, *, frame_rate: float | None = None) -> Video:
    """Finds out how many frames a video has and when each is shown.

    Args:
      source: a path, a `data:` URL, the bytes or a binary file of a video (MP4, Matroska, WebM, AVI ..., through PyAV, which
        the extra `video` installs) or of an animation (GIF, PNG, WebP); a folder of images, in natural order (2 before 10); a
        list of images, each anything `read_image` takes; or an array, uint8 [T, H, W], [T, H, W, 1], [T, H, W, 3] or
        [T, H, W, 4].
      frame_rate: frames a second of a folder, a list or an array, which carry no times; 24 if not given, as in transformers.
        Files tell their own.

    Raises:
      ValueError: no such file, not a video, cut short, no frames, or PyAV is needed and missing. The message names the source.
    """
    if frame_rate is not None and not 0 < frame_rate < math.inf:
        raise ValueError(f"frame_rate is {frame_rate}; expected a number above 0")
    if isinstance(source, str) and source.startswith("data:"):
        decoded = data_url_bytes(source)
        return _from_file(lambda: io.BytesIO(decoded), describe(source), frame_rate)
    if isinstance(source, (str, os.PathLike)):
        path = os.fspath(source)
        folder = _folder(path)
        if folder is not None:
            return _from_images(_frame_files(folder), path, frame_rate)
        return _from_file(lambda: open_file(path), path, frame_rate)
    if isinstance(source, np.ndarray):
        if source.ndim != 4 and not (source.ndim == 3 and source.shape[-1] not in (3, 4)):
            raise ValueError(f"{describe(source)} is not a video; expected [frames, height, width] and perhaps channels")
        return _from_images(list(source), describe(source), frame_rate)
    if isinstance(source, (bytes, bytearray, memoryview)) or hasattr(source, "read"):
        name = describe(source)
        contents = read_bytes(source, name) if hasattr(source, "read") else bytes(source)
        return _from_file(lambda: io.BytesIO(contents), name, frame_rate)
    if isinstance(source, (list, tuple)):
        return _from_images(source, f"the list of {len(source)} frames", frame_rate)
    raise ValueError(f"cannot read a video from {describe(source)}; expected a path, bytes, a binary file, a list or an array")


def _from_images(images: Sequence[ImageSource], name: str, frame_rate: float | None) -> Video:
    if not len(images):
        raise ValueError(f"{name} has no frames")
    rate = Fraction(DEFAULT_FRAME_RATE if frame_rate is None else frame_rate)
    times = [float(index / rate) for index in range(len(images))]
    return Video(name, times, rate, lambda indices: (read_image(images[index]) for index in indices))


def _folder(path: str) -> epath.Path | None:
    """The folder at this path, None where there is none; `open_file` then tells what is wrong."""
    if path.startswith(("http://", "https://")):
        return None
    try:
        folder = epath.Path(path).expanduser()
        return folder if folder.is_dir() else None
    except (OSError, RuntimeError, KeyError, ImportError, ValueError):
        return None


def _frame_files(folder: epath.Path) -> list[ImageSource]:
    files = [file for file in folder.iterdir() if file.suffix.lower() in _SUFFIXES and not file.name.startswith(".")]
    if not files:
        raise ValueError(f"the folder {folder} has no frames; expected images ({', '.join(sorted(_SUFFIXES))})")
    return [os.fspath(file) for file in sorted(files, key=lambda file: _natural(file.name))]


def _natural(name: str) -> list[tuple[int, str]]:
    """Orders frame2 before frame10: runs of digits count as numbers."""
    return [(int(part), part) if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name) if part]


def _from_file(opener: Opener, name: str, frame_rate: float | None) -> Video:
    if frame_rate is not None:
        raise ValueError(f"frame_rate is {frame_rate}, but {name} is a file, which tells its own; leave frame_rate out")
    with opener() as file:
        head = file.read(12)
    if not head:
        raise ValueError(f"{name} is empty")
    still = next((kind for magic, kind in _STILL.items() if head.startswith(magic)), None)
    if still:
        raise ValueError(f"{name} is a still image ({still}); give it as an image, or as a list of one frame")
    if head.startswith((b"GIF8", b"\x89PNG")) or (head[:4] == b"RIFF" and head[8:12] == b"WEBP"):
        return _from_animation(opener, name)
    video = scan_video(opener, name)
    return Video(name, video.times, video.frame_rate, video.read)


def _from_animation(opener: Opener, name: str) -> Video:
    durations = [milliseconds for _, milliseconds in _played(opener, name)]
    ends = list(itertools.accumulate(durations))
    times = [(end - duration) / 1000 for end, duration in zip(ends, durations, strict=True)]

    def read(indices: Sequence[int]) -> Iterator[np.ndarray]:
        wanted = iter(indices)
        index = next(wanted, None)
        # Each frame is drawn over the one before, so those between must be gone through too.
        for place, (image, _) in enumerate(_played(opener, name)):
            if index == place:
                frame = read_image(image)
                while index == place:
                    yield frame
                    index = next(wanted, None)
            if index is None:
                return

    return Video(name, times, Fraction(1000 * len(durations)) / Fraction(ends[-1]), read)


def _played(opener: Opener, name: str) -> Iterator[tuple[Image.Image, float]]:
    """The opened animation at each of its frames, and the milliseconds that is shown."""
    try:
        with opener() as file, Image.open(file, formats=_ANIMATIONS) as image:
            for index in range(getattr(image, "n_frames", 1)):
                image.seek(index)
                image.load()
                yield image, image.info.get("duration") or _DEFAULT_MILLISECONDS
    except Image.DecompressionBombError as error:
        raise ValueError(f"{name} is too large: {error}") from error
    except (OSError, EOFError, SyntaxError, IndexError, ValueError, struct.error) as error:
        raise ValueError(f"{name} is a truncated or corrupt animation: {error or type(error).__name__}") from error
