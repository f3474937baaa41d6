"""Images and videos to patches, and images spread over devices. Nothing here imports jax."""

from ernie_jax.data.vision.balance import assign, assign_rows, imbalance, naive_assignment
from ernie_jax.data.vision.image_processor import ImageProcessor
from ernie_jax.data.vision.patches import VisionPatches, num_tokens, patchify
from ernie_jax.data.vision.reading import ImageSource, read_image
from ernie_jax.data.vision.resize import smart_resize
from ernie_jax.data.vision.sampling import SAMPLINGS, sample_frames
from ernie_jax.data.vision.timestamps import draw_timestamp, format_timestamp
from ernie_jax.data.vision.video_processor import VideoProcessor
from ernie_jax.data.vision.video_reading import Video, VideoSource, open_video

__all__ = [
    "SAMPLINGS",
    "ImageProcessor",
    "ImageSource",
    "Video",
    "VideoProcessor",
    "VideoSource",
    "VisionPatches",
    "assign",
    "assign_rows",
    "draw_timestamp",
    "format_timestamp",
    "imbalance",
    "naive_assignment",
    "num_tokens",
    "open_video",
    "patchify",
    "read_image",
    "sample_frames",
    "smart_resize",
]
