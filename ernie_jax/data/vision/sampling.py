"""Which frames of a video are looked at."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np

SAMPLINGS = ("even", "middle")
# Frames a second of the original processor where nothing else is asked for.
ORIGINAL_FPS = 2


def sample_frames(
    total: int,
    frame_rate: float | Fraction,
    *,
    sampling: str = "even",
    num_frames: int | None = None,
    fps: float | None = None,
    min_frames: int = 16,
    max_frames: int = 180,
) -> list[int]:
    """Indices of the frames taken, ascending.

    `even` is the rule of transformers' video processor. n frames are taken at the indices floor(i * total / n), i = 0, 1, ...;
    n is `num_frames`; or, from total/frame_rate*fps (without `fps`: all), what lies within `min_frames` and `max_frames`; never
    more than there are. (The reference counts in floating point, and now and then gives one index too many, past the end.)

    `middle` is the rule of the original processor: the middle of each interval of 1/fps seconds (2 a second where nothing is
    given), rounded to a frame. Where that would be fewer than `min_frames` or more than `max_frames`, the video is cut into so
    many intervals of whole frames instead, and likewise for `num_frames`, and the middle of each, rounded down, is taken.

    Args:
      total: frames of the video.
      frame_rate: its frames a second.
      sampling: `even` or `middle`.
      num_frames: how many; within `min_frames` and `max_frames`.
      fps: how many a second; not together with `num_frames`.
      min_frames, max_frames: bounds of the number.

    Raises:
      ValueError: `num_frames` out of its bounds or above `total`, or arguments that contradict each other.
    """
    check_sampling(sampling, num_frames, fps, min_frames, max_frames)
    if total < 1 or frame_rate <= 0:
        raise ValueError(f"a video of {total} frames at {float(frame_rate)} a second cannot be sampled")
    if num_frames is not None and num_frames > total:
        raise ValueError(f"num_frames is {num_frames}, but the video has {total} frames; ask for fewer")
    rate = Fraction(frame_rate)
    if sampling == "middle":
        return _middle(total, rate, num_frames, Fraction(ORIGINAL_FPS if fps is None else fps), min_frames, max_frames)
    count = Fraction(num_frames if num_frames is not None else total)
    if fps is not None:
        count = total / rate * Fraction(fps)
    if num_frames is None:
        count = min(max(count, Fraction(min_frames)), Fraction(max_frames), Fraction(total))
    return [int(index * total / count) for index in range(math.ceil(count))]


def check_sampling(sampling: str, num_frames: int | None, fps: float | None, min_frames: int, max_frames: int) -> None:
    """ValueError where the arguments of `sample_frames` contradict each other whatever the video."""
    if sampling not in SAMPLINGS:
        raise ValueError(f"sampling is {sampling!r}; expected one of {', '.join(SAMPLINGS)}")
    for name, value in (("num_frames", num_frames), ("min_frames", min_frames), ("max_frames", max_frames)):
        if not isinstance(value, int) and not (value is None and name == "num_frames"):
            raise ValueError(f"{name} is {value!r}; expected an integer")
    if num_frames is not None and fps is not None:
        raise ValueError(f"num_frames is {num_frames} and fps is {fps}; give one of them")
    if not 1 <= min_frames <= max_frames:
        raise ValueError(f"min_frames is {min_frames} and max_frames {max_frames}; expected 1 <= min_frames <= max_frames")
    if num_frames is not None and not min_frames <= num_frames <= max_frames:
        raise ValueError(
            f"num_frames is {num_frames}; expected min_frames {min_frames} to max_frames {max_frames}, or change those"
        )
    if fps is not None and not (isinstance(fps, int | float) and 0 < fps < math.inf):
        raise ValueError(f"fps is {fps!r}; expected a number above 0")


def _middle(total: int, rate: Fraction, num_frames: int | None, fps: Fraction, min_frames: int, max_frames: int) -> list[int]:
    wanted = math.floor(total / rate * fps) if num_frames is None else num_frames
    if num_frames is not None or not min_frames <= wanted <= max_frames:
        count = min(max(wanted, min_frames), max_frames, total)
        # In floating point, as in the original, where an edge may so fall a frame early.
        edges = np.linspace(0, total, count + 1).astype(int).tolist()
        return [(start + stop - 1) // 2 for start, stop in itertools.pairwise(edges)]
    # Ties of round go to the even frame, as numpy's around does in the original.
    indices = (round((index + Fraction(1, 2)) / fps * rate) for index in range(math.ceil(total / rate * fps)))
    return [index for index in indices if index < total]
