"""What images and video frames have in common: resizing, normalisation, and the Hugging Face file that states both.

H, W of a frame in pixels, p patch size, m merge size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from etils import epath
from PIL import Image

from ernie_jax.data.vision.patches import patchify
from ernie_jax.data.vision.resize import smart_resize

# Mean and deviation of the pixels CLIP was trained on.
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, kw_only=True)
class PixelSettings:
    """How RGB pixels become patches.

    Attributes:
      patch_size: p.
      merge_size: m; m*m patches become one token, so sides are brought to multiples of p*m.
      min_pixels, max_pixels: bounds of H*W after resizing.
      image_mean, image_std: of each channel, taken off and divided by after rescaling.
      rescale_factor: brings 0..255 to 0..1.
      do_resize: without it, sides must be multiples of p*m already.
      do_rescale, do_normalize: leave one out for a model trained without it.
      resample: Pillow's number of the filter; 3 is bicubic.
    """

    patch_size: int = 14
    merge_size: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 6177 * 28 * 28
    image_mean: tuple[float, float, float] = CLIP_MEAN
    image_std: tuple[float, float, float] = CLIP_STD
    rescale_factor: float = 1 / 255
    do_resize: bool = True
    do_rescale: bool = True
    do_normalize: bool = True
    resample: int = int(Image.Resampling.BICUBIC)

    def __post_init__(self) -> None:
        for name in ("patch_size", "merge_size", "min_pixels", "max_pixels"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; expected an integer of at least 1")
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels {self.min_pixels} is above max_pixels {self.max_pixels}")
        for name in ("image_mean", "image_std"):
            value = getattr(self, name)
            if not isinstance(value, (list, tuple)) or len(value) != 3 or not all(_is_number(x) for x in value):
                raise ValueError(f"{name} is {value!r}; expected three numbers, for red, green and blue")
            object.__setattr__(self, name, tuple(float(x) for x in value))
        if min(self.image_std) <= 0:
            raise ValueError(f"image_std is {self.image_std}; expected numbers above 0")
        if not _is_number(self.rescale_factor):
            raise ValueError(f"rescale_factor is {self.rescale_factor!r}; expected a number")
        for name in ("do_resize", "do_rescale", "do_normalize"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected true or false")
        if self.resample not in list(Image.Resampling):
            raise ValueError(f"resample is {self.resample!r}; expected one of Pillow's filters, 0 to 5 (3 is bicubic)")

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width, in pixels, that a frame of this size is brought to; ValueError where it cannot be."""
        factor = self.patch_size * self.merge_size
        if self.do_resize:
            return smart_resize(height, width, factor=factor, min_pixels=self.min_pixels, max_pixels=self.max_pixels)
        if height % factor or width % factor:
            raise ValueError(f"do_resize is off and the size {height}x{width} does not divide by patch_size*merge_size = {factor}")
        return height, width

    def resize(self, frame: np.ndarray) -> np.ndarray:
        """Uint8 [H, W, 3] resized by Pillow to the size `resized` gives."""
        height, width = self.resized(*frame.shape[:2])
        if (height, width) == frame.shape[:2]:
            return frame
        return np.asarray(Image.fromarray(frame).resize((width, height), Image.Resampling(self.resample)))

    def patches(self, frame: np.ndarray) -> np.ndarray:
        """Normalised patches, float32 [h*w, 3*p*p], of a resized frame, uint8 [H, W, 3]."""
        cut = patchify(frame, self.patch_size, self.merge_size)
        table = self._table()
        out = np.empty(cut.shape, np.float32)
        for channel in range(3):
            np.take(table[channel], cut[:, channel], out=out[:, channel])
        return out.reshape(len(cut), -1)

    def _table(self) -> np.ndarray:
        """The normalised value of each of the 256 levels, float32 [3, 256]."""
        levels = np.tile(np.arange(256.0), (3, 1))
        if self.do_rescale:
            levels = levels * self.rescale_factor
        if self.do_normalize:
            levels = (levels - np.array(self.image_mean)[:, None]) / np.array(self.image_std)[:, None]
        return levels.astype(np.float32)

    def to_json(self) -> dict[str, Any]:
        """The settings under the names Hugging Face's processors use."""
        return {
            "do_convert_rgb": True,
            "do_normalize": self.do_normalize,
            "do_rescale": self.do_rescale,
            "do_resize": self.do_resize,
            "image_mean": list(self.image_mean),
            "image_std": list(self.image_std),
            "merge_size": self.merge_size,
            "patch_size": self.patch_size,
            "resample": int(self.resample),
            "rescale_factor": self.rescale_factor,
            "size": {"longest_edge": self.max_pixels, "shortest_edge": self.min_pixels},
        }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


_NAMES = frozenset(field.name for field in fields(PixelSettings))


def pixel_settings(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Keyword arguments of `PixelSettings` from the contents of a Hugging Face processor file.

    Bounds of the pixels are `min_pixels` and `max_pixels`, by themselves or within `size`, or `shortest_edge` and `longest_edge`
    within `size`. What is missing or null keeps its default. Keys that name no operation on pixels are passed over.

    Raises:
      ValueError: the file asks for what is not done here: another form of `size`, or an operation `do_...` unknown or refused.
    """
    settings = {name: config[name] for name in _NAMES if config.get(name) is not None}
    size = config.get("size") or {}
    known = ({"shortest_edge", "longest_edge"}, {"min_pixels", "max_pixels"})
    if not isinstance(size, Mapping) or (size and set(size) not in known and not {"min_pixels", "max_pixels"} <= set(settings)):
        raise ValueError(f"{where}: size is {size!r}; expected shortest_edge and longest_edge, the bounds of height*width")
    for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        bound = size.get(name, size.get(edge))
        if bound is not None:
            settings.setdefault(name, bound)
    if config.get("do_convert_rgb") is False:
        raise ValueError(f"{where}: do_convert_rgb is false; images are always brought to RGB here")
    done = _NAMES | {"do_convert_rgb", "do_sample_frames"}
    for name, value in config.items():
        if name.startswith("do_") and value and name not in done:
            raise ValueError(
                f"{where}: {name} is {value!r}, which is not supported; set it to false if the model was trained without"
            )
    return settings


def read_processor_config(folder: epath.PathLike, file_name: str, nested: str) -> tuple[dict[str, Any], str]:
    """A processor's settings in a checkpoint folder, and the file they stand in.

    As in transformers, the part `nested` of `processor_config.json` is asked first, then the file of its own, `file_name`.
    Where there is neither, the settings are empty.

    Raises:
      ValueError: a file that is no JSON object.
    """
    root = epath.Path(folder)
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder; give the folder of a checkpoint")
    both = _read_json(root / "processor_config.json").get(nested)
    if both is not None:
        if not isinstance(both, dict):
            raise ValueError(f"{nested} in {root / 'processor_config.json'} is {both!r}; expected an object")
        return both, str(root / "processor_config.json")
    return _read_json(root / file_name), str(root / file_name)


def write_processor_config(folder: epath.PathLike, file_name: str, config: Mapping[str, Any]) -> None:
    """Writes the settings, keys sorted; the folder is made if missing."""
    root = epath.Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    (root / file_name).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _read_json(file: epath.Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        contents = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(contents, dict):
        raise ValueError(f"{file} holds a {type(contents).__name__}; expected a JSON object")
    return contents
