"""Frames of MP4, Matroska, WebM and other video files through PyAV, decoding little more than what is asked for."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import IO, Any

import numpy as np

from ernie_jax.data.vision.reading import read_image

# Self-contained files only: playlists and the like name further files and addresses, which would then be opened too.
FORMATS = ("mov", "matroska", "avi", "flv", "mpegts", "mpeg", "mpegvideo", "ogg", "asf", "h264", "hevc", "ivf", "m4v")

Opener = Callable[[], IO[bytes]]


@dataclass(frozen=True)
class VideoFile:
    """What a look through a file's packets tells, without decoding them.

    Attributes:
      name: names the file in messages.
      opener: opens it anew.
      times: seconds of each frame from the first, ascending.
      frame_rate: frames a second, on average.
      pts: the same times in the file's own unit, or None where it lacks some: it is then decoded from the start.
      keys: (pts, dts) of the frames that need no other to be decoded, ascending; dts is the time of decoding.
    """

    name: str
    opener: Opener
    times: tuple[float, ...]
    frame_rate: Fraction
    pts: tuple[int, ...] | None
    keys: tuple[tuple[int, int], ...]

    def read(self, indices: Sequence[int]) -> Iterator[np.ndarray]:
        """The frames of these ascending indices, uint8 [H, W, 3], upright.

        Raises:
          ValueError: the file ends early or is corrupt.
        """
        with _opened(self.opener, self.name) as (container, stream):
            found = self._by_count(container, stream, indices) if self.pts is None else self._by_time(container, stream, indices)
            for frame in found:
                if frame.is_corrupt:
                    raise ValueError(f"{self.name} is corrupt near second {float(frame.time or 0):.2f}")
                yield _rgb(frame)

    def _by_count(self, container: Any, stream: Any, indices: Sequence[int]) -> Iterator[Any]:
        frames = enumerate(container.decode(stream))
        place, frame = -1, None
        for index in indices:
            while place < index:
                place, frame = next(frames, (-1, None))
                if frame is None:
                    raise ValueError(f"{self.name} is cut short: it ends before frame {index}")
            yield frame

    def _by_time(self, container: Any, stream: Any, indices: Sequence[int]) -> Iterator[Any]:
        assert self.pts is not None
        frames: Iterator[Any] = container.decode(stream)
        frame = next(frames, None)
        for index in indices:
            wanted = self.pts[index]
            key = bisect.bisect_right(self.keys, (wanted, 2**63)) - 1
            if key > 0 and frame is not None and frame.pts is not None and frame.pts < self.keys[key][0]:
                frames, frame = self._landed(container, stream, key, wanted)
            while frame is not None and (frame.pts is None or frame.pts < wanted):
                frame = next(frames, None)
            if frame is None:
                raise ValueError(f"{self.name} is cut short: it ends before frame {index}")
            yield frame

    def _landed(self, container: Any, stream: Any, key: int, wanted: int) -> tuple[Iterator[Any], Any]:
        """Decoding from a keyframe on: the frames to come and the first one, not behind `wanted`."""
        # Containers seek by the time a frame is shown (MP4, Matroska) or decoded (AVI); from the start none goes too far.
        for place in (*self.keys[key], self.keys[0][1]):
            container.seek(place, stream=stream, backward=True)
            frames = container.decode(stream)
            frame = next(frames, None)
            if frame is not None and frame.pts is not None and frame.pts <= wanted:
                break
        return frames, frame


def scan_video(opener: Opener, name: str) -> VideoFile:
    """Looks through the packets of a video file's first video stream.

    Raises:
      ValueError: PyAV is not installed, the file is not a video of a known format, or it is cut short.
    """
    with _opened(opener, name) as (container, stream):
        packets = [packet for packet in container.demux(stream) if packet.size]
        expected = stream.frames if "mov" in container.format.name else 0
        if len(packets) < expected:
            raise ValueError(f"{name} is cut short: it has {len(packets)} of its {expected} frames")
        # What is flagged so stands before an edit's start: it is decoded, but not shown.
        shown = [packet for packet in packets if not packet.is_discard]
        pts = sorted(packet.pts for packet in shown if packet.pts is not None)
        keys = sorted((p.pts, p.pts if p.dts is None else p.dts) for p in packets if p.is_keyframe and p.pts is not None)
        rate, unit = stream.average_rate, stream.time_base
    if not shown:
        raise ValueError(f"{name} has no video frames")
    if len(pts) == len(shown) == len(set(pts)) and keys and unit:
        times = tuple(float((value - pts[0]) * unit) for value in pts)
        if not rate:
            rate = (len(pts) - 1) / ((pts[-1] - pts[0]) * unit) if len(pts) > 1 else Fraction(1)
        return VideoFile(name, opener, times, Fraction(rate), tuple(pts), tuple(keys))
    with _opened(opener, name) as (container, stream):
        count = sum(1 for _ in container.decode(stream))
    if not count or not rate:
        raise ValueError(f"{name} has {count} frames that can be decoded and {'a' if rate else 'no'} frame rate; convert it to MP4")
    return VideoFile(name, opener, tuple(float(index / rate) for index in range(count)), Fraction(rate), None, ())


@contextmanager
def _opened(opener: Opener, name: str) -> Iterator[tuple[Any, Any]]:
    try:
        import av
    except ImportError as error:
        raise ValueError(f"{name} needs PyAV to be read; install it with: pip install 'ernie-jax[video]'") from error
    try:
        options = {"format_whitelist": ",".join(FORMATS)}
        # Titles in no known encoding: PyAV 19 reads them as they are and no longer takes a word about it.
        lenient: dict[str, Any] = {} if int(av.__version__.split(".")[0]) >= 19 else {"metadata_errors": "ignore"}
        with opener() as file, av.open(file, container_options=options, **lenient) as container:
            if not container.streams.video:
                raise ValueError(f"{name} holds no video stream")
            yield container, container.streams.video[0]
    except av.error.FFmpegError as error:
        raise ValueError(
            f"{name} is not a video ({', '.join(FORMATS)}), or it is cut short or corrupt: {error.strerror}"
        ) from error


def _rgb(frame: Any) -> np.ndarray:
    transparent = any(component.is_alpha for component in frame.format.components)
    pixels = read_image(frame.to_ndarray(format="rgba" if transparent else "rgb24"))
    # Phones store frames as the sensor sees them; the file tells the counter-clockwise turn to show them by.
    return np.ascontiguousarray(np.rot90(pixels, round(frame.rotation / 90)))
