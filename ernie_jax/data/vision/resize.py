"""The size an image is brought to before it is cut into patches."""

from __future__ import annotations

import math

MAX_ASPECT_RATIO = 200


def smart_resize(height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Nearest size that divides by `factor`, keeps the aspect ratio about and has between `min_pixels` and `max_pixels` pixels.

    Both sides are rounded to the nearest multiple, ties to the even one. Where that gives too many pixels, the sides are
    shrunk by sqrt(height*width/max_pixels) and rounded down, though not below `factor`; where too few, they are stretched by
    sqrt(min_pixels/(height*width)) and rounded up. A very long image may so keep more than `max_pixels`.

    Source: `smart_resize` of transformers' ernie4_5_vl_moe. (The original code clamps aspect ratios to 200 instead of raising.)

    Returns:
      (height, width), at least `factor` each.

    Raises:
      ValueError: a side is below 1, or the longer is more than 200 times the shorter.
    """
    if height < 1 or width < 1:
        raise ValueError(f"an image of height {height} and width {width} has no pixels")
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise ValueError(
            f"the image is {height} high and {width} wide, an aspect ratio of {max(height, width) / min(height, width):.1f}; "
            f"at most {MAX_ASPECT_RATIO} is supported: crop it or cut it into pieces"
        )
    # Python's round takes ties to the even multiple, as the reference does: 42 / 28 = 1.5 gives 2, 70 / 28 = 2.5 gives 2.
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < min_pixels:
        stretch = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * stretch / factor) * factor
        new_width = math.ceil(width * stretch / factor) * factor
    return new_height, new_width
