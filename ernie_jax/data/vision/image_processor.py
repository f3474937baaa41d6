"""Images to patches, as the published checkpoints expect them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from etils import epath

from ernie_jax.data.vision.patches import VisionPatches
from ernie_jax.data.vision.pixels import PixelSettings, pixel_settings, read_processor_config, write_processor_config
from ernie_jax.data.vision.reading import ImageSource, describe, read_image

FILE_NAME = "preprocessor_config.json"


@dataclass(frozen=True, kw_only=True)
class ImageProcessor(PixelSettings):
    """Reads, resizes, normalises and cuts one image; the fields are those of `PixelSettings`.

    Equal to transformers' `Ernie4_5_VLMoeImageProcessorPil`, which resizes with Pillow as this does; the torchvision form has a
    bicubic kernel of its own and differs by a level or two here and there.

    Example:
      patches = ImageProcessor.from_folder(checkpoint)("photo.jpg")
    """

    def __call__(self, source: ImageSource) -> VisionPatches:
        """Patches of the image: grid (1, H/p, W/p).

        Args:
          source: anything `read_image` takes.

        Raises:
          ValueError: the image cannot be read or resized; the message names it.
        """
        image = read_image(source)
        try:
            resized = self.resize(image)
        except ValueError as error:
            raise ValueError(f"{describe(source)}: {error}") from error
        height, width = resized.shape[:2]
        return VisionPatches(self.patches(resized), (1, height // self.patch_size, width // self.patch_size), "image")

    @classmethod
    def from_folder(cls, folder: epath.PathLike, **changes: Any) -> Self:
        """Settings from `preprocessor_config.json`, or `processor_config.json`, in a checkpoint folder; defaults where absent.

        Args:
          folder: local or remote.
          **changes: fields to set differently.

        Raises:
          ValueError: a setting that is not supported, or a file that cannot be read.
        """
        config, where = read_processor_config(folder, FILE_NAME, "image_processor")
        try:
            return cls(**{**pixel_settings(config, where), **changes})
        except ValueError as error:
            raise ValueError(str(error) if where in str(error) else f"{where}: {error}") from error

    def save(self, folder: epath.PathLike) -> None:
        """Writes `preprocessor_config.json`, which transformers and `from_folder` read."""
        config = {**self.to_json(), "image_processor_type": "Ernie4_5_VLMoeImageProcessor", "temporal_patch_size": 1}
        write_processor_config(folder, FILE_NAME, config)
