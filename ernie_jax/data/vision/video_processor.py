"""Videos to patches, as the published checkpoints expect them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from etils import epath

from ernie_jax.data.vision.patches import VisionPatches
from ernie_jax.data.vision.pixels import PixelSettings, pixel_settings, read_processor_config, write_processor_config
from ernie_jax.data.vision.sampling import check_sampling, sample_frames
from ernie_jax.data.vision.timestamps import draw_timestamp
from ernie_jax.data.vision.video_reading import VideoSource, open_video

FILE_NAME = "video_preprocessor_config.json"
TEMPORAL_PATCH_SIZE = 2
_FIELDS = ("num_frames", "fps", "min_frames", "max_frames")


@dataclass(frozen=True, kw_only=True)
class VideoProcessor(PixelSettings):
    """Samples, stamps, resizes, normalises and cuts one video; an odd number of frames gets its last one twice.

    The rules are those of transformers' `Ernie4_5_VLMoeVideoProcessor`, whose resizing by torchvision differs by a level or two
    here and there from Pillow's, used here.

    Attributes beside those of `PixelSettings`:
      min_pixels, max_pixels: of one frame.
      num_frames, fps, min_frames, max_frames, sampling: which frames, see `sample_frames`.
      draw_timestamps: write each frame's time into its corner, as in training, see `draw_timestamp`.
      font: path of the font for it; None is Pillow's own.
    """

    min_pixels: int = 299 * 28 * 28
    max_pixels: int = 1196 * 28 * 28
    num_frames: int | None = None
    fps: float | None = None
    min_frames: int = 16
    max_frames: int = 180
    sampling: str = "even"
    draw_timestamps: bool = True
    font: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sampling(self.sampling, self.num_frames, self.fps, self.min_frames, self.max_frames)

    def __call__(self, source: VideoSource, *, frame_rate: float | None = None) -> VisionPatches:
        """Patches of the video: grid (t, H/p, W/p), t even, with the time of each frame.

        Args:
          source: anything `open_video` takes.
          frame_rate: frames a second of a folder, list or array of frames, 24 if not given.

        Raises:
          ValueError: the video cannot be read, sampled or resized, or its frames differ in size; the message names it.
        """
        video = open_video(source, frame_rate=frame_rate)
        try:
            indices = sample_frames(
                video.num_frames,
                video.frame_rate,
                sampling=self.sampling,
                num_frames=self.num_frames,
                fps=self.fps,
                min_frames=self.min_frames,
                max_frames=self.max_frames,
            )
        except ValueError as error:
            raise ValueError(f"{video.name}: {error}") from error
        times = [video.times[index] for index in indices]
        frames = len(indices) + len(indices) % TEMPORAL_PATCH_SIZE
        rows, shape, grid = np.zeros((0, 0), np.float32), (0, 0, 0), (0, 0)
        # One frame at a time: a hundred full-size frames would not fit where their patches do.
        for place, (index, frame) in enumerate(zip(indices, video.read(indices), strict=True)):
            if place and frame.shape != shape:
                raise ValueError(
                    f"{video.name}: frame {index} is {frame.shape[0]}x{frame.shape[1]} pixels, "
                    f"frame {indices[0]} is {shape[0]}x{shape[1]}; frames must have one size"
                )
            shape = frame.shape
            patches, grid = self._frame_patches(frame, times[place], f"{video.name}: frame {index}")
            if not place:
                rows = np.empty((frames * len(patches), patches.shape[1]), np.float32)
            rows[place * len(patches) : (place + 1) * len(patches)] = patches
        if frames > len(indices):
            area = grid[0] * grid[1]
            rows[-area:] = rows[-2 * area : -area]
            times.append(times[-1])
        return VisionPatches(rows, (frames, *grid), "video", tuple(times))

    def _frame_patches(self, frame: np.ndarray, seconds: float, name: str) -> tuple[np.ndarray, tuple[int, int]]:
        try:
            # Drawn before resizing, as in the reference.
            resized = self.resize(draw_timestamp(frame, seconds, self.font) if self.draw_timestamps else frame)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        return self.patches(resized), (resized.shape[0] // self.patch_size, resized.shape[1] // self.patch_size)

    @classmethod
    def from_folder(cls, folder: epath.PathLike, **changes: Any) -> Self:
        """Settings from `processor_config.json` or `video_preprocessor_config.json` in a checkpoint folder; else defaults.

        Args:
          folder: local or remote.
          **changes: fields to set differently.

        Raises:
          ValueError: a setting that is not supported, a file that cannot be read, or a font named but not in the folder.
        """
        config, where = read_processor_config(folder, FILE_NAME, "video_processor")
        try:
            settings = pixel_settings(config, where)
            settings |= {name: config[name] for name in _FIELDS if config.get(name) is not None}
            if config.get("temporal_patch_size", TEMPORAL_PATCH_SIZE) != TEMPORAL_PATCH_SIZE:
                raise ValueError(f"temporal_patch_size is {config['temporal_patch_size']}; only {TEMPORAL_PATCH_SIZE} is supported")
            if config.get("do_sample_frames") is False:
                raise ValueError("do_sample_frames is false; videos are always sampled here")
            if config.get("draw_on_frames") is not None:
                settings["draw_timestamps"] = config["draw_on_frames"]
            settings |= changes
            if config.get("font") and settings.get("draw_timestamps", True) and "font" not in settings:
                font = epath.Path(folder) / config["font"]
                if not font.exists():
                    raise ValueError(f"the font {font} is missing; put it there, or pass font=None for Pillow's own")
                settings["font"] = str(font)
            return cls(**settings)
        except ValueError as error:
            raise ValueError(str(error) if where in str(error) else f"{where}: {error}") from error

    def save(self, folder: epath.PathLike) -> None:
        """Writes `video_preprocessor_config.json` and a copy of the font if one is given.

        Transformers reads the file too; to draw timestamps it wants the font beside it. `sampling` is no setting of its and is
        not written.
        """
        config: dict[str, Any] = {
            **self.to_json(),
            **{name: getattr(self, name) for name in _FIELDS},
            "do_sample_frames": True,
            "draw_on_frames": self.draw_timestamps,
            "temporal_patch_size": TEMPORAL_PATCH_SIZE,
            "video_processor_type": "Ernie4_5_VLMoeVideoProcessor",
        }
        if self.font is not None:
            source = epath.Path(self.font)
            config["font"] = source.name
            epath.Path(folder).mkdir(parents=True, exist_ok=True)
            target = epath.Path(folder) / source.name
            if target != source:
                target.write_bytes(source.read_bytes())
        write_processor_config(folder, FILE_NAME, config)
