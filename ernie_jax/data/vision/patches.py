"""One image or video as rows of pixels for the vision tower.

t frames, h and w patches down and across, m merge size, p patch size, C channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ernie_jax.data.vision.geometry import Grid

Kind = Literal["image", "video"]
KINDS: tuple[Kind, ...] = ("image", "video")


@dataclass(frozen=True, eq=False)
class VisionPatches:
    """Patches of one image or video.

    Attributes:
      pixel_values: [t*h*w, C*p*p] float32, normalised. Rows go frame by frame, then by merge blocks (h/m, w/m, m, m): the m*m
        patches that become one token lie side by side. A row is channel-major (C, p, p).
      grid_thw: (t, h, w); an image has t = 1.
      kind: `image` or `video`.
      timestamps: seconds from the video's start, one a frame; () for images.
    """

    pixel_values: np.ndarray
    grid_thw: Grid
    kind: Kind
    timestamps: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}; expected one of {', '.join(KINDS)}")
        if self.pixel_values.ndim != 2 or len(self.pixel_values) != math.prod(self.grid_thw):
            raise ValueError(f"pixel_values of shape {self.pixel_values.shape} do not fill the grid {self.grid_thw}")
        if self.kind == "image" and self.grid_thw[0] != 1:
            raise ValueError(f"an image has one frame, got the grid {self.grid_thw}")
        frames = self.grid_thw[0] if self.kind == "video" else 0
        if self.timestamps and len(self.timestamps) != frames:
            raise ValueError(f"got {len(self.timestamps)} timestamps for the {self.kind} grid {self.grid_thw}")


def num_tokens(grid_thw: Grid, merge_size: int, temporal_merge_size: int = 2, *, kind: Kind) -> int:
    """Placeholder tokens of one image, h*w/m^2, or one video, t/temporal_merge_size * h*w/m^2.

    Raises:
      ValueError: the grid does not divide by the merge sizes, or an image has more than one frame.
    """
    t, h, w = grid_thw
    if min(grid_thw) < 1 or h % merge_size or w % merge_size:
        raise ValueError(f"grid {grid_thw} does not divide into blocks of {merge_size}x{merge_size} patches")
    if kind == "image":
        if t != 1:
            raise ValueError(f"an image has one frame, got the grid {grid_thw}")
        return h * w // merge_size**2
    if kind != "video":
        raise ValueError(f"kind is {kind!r}; expected one of {', '.join(KINDS)}")
    if t % temporal_merge_size:
        raise ValueError(f"{t} frames do not divide by {temporal_merge_size}; repeat the last one")
    return t // temporal_merge_size * (h * w // merge_size**2)


def patchify(image: np.ndarray, patch_size: int, merge_size: int) -> np.ndarray:
    """Cuts [H, W, C] into [h*w, C, p, p], block-major (h/m, w/m, m, m); H and W divide by p*m."""
    height, width, channels = image.shape
    p, m = patch_size, merge_size
    assert height % (p * m) == 0 and width % (p * m) == 0, (image.shape, p, m)
    blocks = image.reshape(height // (p * m), m, p, width // (p * m), m, p, channels)
    return blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, channels, p, p)
