"""An image from a file, bytes, Pillow or an array to RGB. H rows, W columns."""

from __future__ import annotations

import base64
import io
import os
import struct
from pathlib import Path
from typing import IO, Any

import numpy as np
from etils import epath
from PIL import ExifTags, Image

ImageSource = str | os.PathLike[str] | bytes | bytearray | memoryview | IO[bytes] | Image.Image | np.ndarray

# Only plain raster formats: others of Pillow's start programs (EPS) or are rare enough to be an attack rather than a picture.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
# A file of a few kilobytes can claim any size; beyond this many pixels it is refused before memory is taken. Pillow's own limit.
MAX_PIXELS = 89_478_485

_EXPECTED = "expected a path, bytes, a binary file, a PIL image or an array"
# How to undo each orientation tag of EXIF; 1 is upright.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def read_image(source: ImageSource) -> np.ndarray:
    """RGB pixels, uint8 [H, W, 3], upright and on white; the same from whatever kind of source.

    Args:
      source: a path (local or one `epath` reads), a `data:` URL, the file's bytes, a binary file, a PIL image, or an array:
        [H, W], [H, W, 1], [H, W, 3] or [H, W, 4] of uint8, uint16 or bool. Files are PNG, JPEG, WebP, GIF, BMP, TIFF or PPM;
        of an animation the first frame is taken (of an opened PIL animation the one it stands at).

    The EXIF orientation is applied, transparent pixels are laid on white, and of 16-bit samples the upper byte is taken.

    Raises:
      ValueError: no such file, not an image, truncated or corrupt, without pixels, too large, or an array of another kind. The
        message names the source.
    """
    name = describe(source)
    if isinstance(source, np.ndarray):
        return _from_array(source, name)
    if isinstance(source, Image.Image):
        return _from_pillow(source, name)
    if isinstance(source, str) and source.startswith("data:"):
        return _from_file(io.BytesIO(data_url_bytes(source)), name)
    if isinstance(source, (str, os.PathLike)):
        with open_file(source) as file:
            return _from_file(file, name)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _from_file(io.BytesIO(source), name)
    if hasattr(source, "read"):
        return _from_file(io.BytesIO(read_bytes(source, name)), name)
    raise ValueError(f"cannot read an image from {name}; {_EXPECTED}")


def describe(source: Any) -> str:
    """A few words that name a source in messages."""
    if isinstance(source, str) and source.startswith("data:"):
        return f"the data URL {source[:40]!r}..."
    if isinstance(source, (str, os.PathLike)):
        return str(source)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return f"the file of {len(source)} bytes"
    if isinstance(source, Image.Image):
        file = getattr(source, "filename", "")
        return str(file) if file else f"the PIL image of mode {source.mode} and size {source.width}x{source.height}"
    if isinstance(source, np.ndarray):
        return f"the array of shape {source.shape} and type {source.dtype}"
    return str(getattr(source, "name", "") or f"a {type(source).__name__}")


def open_file(path: str | os.PathLike[str]) -> IO[bytes]:
    """The file opened for reading; ValueError where that fails."""
    name = os.fspath(path)
    if name.startswith(("http://", "https://")):
        raise ValueError(f"{name} is a web address; download it first and give the file or its bytes")
    try:
        return Path(name).expanduser().open("rb") if "://" not in name else epath.Path(name).open("rb")
    except OSError as error:
        raise ValueError(f"cannot open {name}: {error.strerror or error}") from error
    except KeyError as error:
        raise ValueError(f"cannot open {name}: addresses of this kind are not known") from error
    # The home folder of an unknown user; an address whose package is not installed.
    except (RuntimeError, ImportError, ValueError) as error:
        raise ValueError(f"cannot open {name}: {error}") from error


def read_bytes(file: Any, name: str) -> bytes:
    """What is left in a binary file; ValueError for a text file."""
    contents = file.read()
    if not isinstance(contents, (bytes, bytearray)):
        raise ValueError(f"{name} is opened as text; open it in binary mode ('rb')")
    return bytes(contents)


def data_url_bytes(url: str) -> bytes:
    """What a `data:` URL holds; ValueError where it is not base64."""
    name = describe(url)
    head, comma, body = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise ValueError(f"{name} is not of the form data:<type>;base64,<characters>")
    try:
        return base64.b64decode(body, validate=True)
    except ValueError as error:  # binascii.Error is one
        raise ValueError(f"{name} is not valid base64: {error}") from error


def _from_file(file: IO[bytes], name: str) -> np.ndarray:
    if not file.read(1):
        raise ValueError(f"{name} is empty")
    file.seek(0)
    # Pillow's plugins raise whatever comes up on broken files (OSError, SyntaxError, struct.error, zlib.error, IndexError ...).
    try:
        image = Image.open(file, formats=FORMATS)
    except Image.UnidentifiedImageError:
        raise ValueError(f"{name} is not an image ({', '.join(FORMATS)}), or it is cut short") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"{name} is too large: {error}") from error
    except Exception as error:
        raise ValueError(f"{name} is a corrupt image: {error}") from error
    with image:
        return _from_pillow(image, name)


def _from_pillow(image: Image.Image, name: str) -> np.ndarray:
    if not image.width or not image.height:
        raise ValueError(f"{name} has no pixels: {image.width} wide and {image.height} high")
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"{name} is too large: {image.width}x{image.height} pixels, of which at most {MAX_PIXELS} are supported")
    try:
        image.load()
        return _on_white(_eight_bits(_upright(image), image.format))
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError(f"{name} is a truncated, corrupt or unsupported image: {error or type(error).__name__}") from error


def _upright(image: Image.Image) -> Image.Image:
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except (SyntaxError, struct.error, ValueError, TypeError, KeyError, OSError):
        # The pixels are whole; of unreadable camera notes there is nothing to apply.
        return image
    turn = _UPRIGHT.get(orientation)
    return image if turn is None else image.transpose(turn)


def _eight_bits(image: Image.Image, file_format: str | None) -> Image.Image:
    """Samples of 16 bits to their upper byte, as Pillow itself reads 16-bit colour; its plain convert would clip grey at 255."""
    if image.mode == "F" or (image.mode == "I" and file_format not in ("PNG", "PPM")):
        raise ValueError(f"pixels of mode {image.mode} (32 bits) have no known range; convert the image to 8 or 16 bits")
    if image.mode != "I" and not image.mode.startswith("I;16"):
        return image
    values = np.asarray(image)
    grey = Image.fromarray((values >> 8).astype(np.uint8))
    transparent = image.info.get("transparency")
    if transparent is None:
        return grey
    alpha = Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8))
    return Image.merge("LA", (grey, alpha))


def _on_white(image: Image.Image) -> np.ndarray:
    if image.has_transparency_data:
        if image.mode == "La":
            image = image.convert("LA")  # Pillow has no direct way from premultiplied grey to RGBA
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return np.array(image.convert("RGB"))


def _from_array(array: np.ndarray, name: str) -> np.ndarray:
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[-1] not in (1, 3, 4)):
        hint = "; move the channels last" if array.ndim == 3 and array.shape[0] in (1, 3, 4) else ""
        raise ValueError(f"{name} is not an image; expected [H, W], [H, W, 1], [H, W, 3] or [H, W, 4]{hint}")
    if not array.size:
        raise ValueError(f"{name} has no pixels")
    if array.dtype == np.bool_:
        array = array.astype(np.uint8) * np.uint8(255)
    elif array.dtype == np.uint16:
        array = (array >> 8).astype(np.uint8)
    elif array.dtype != np.uint8:
        hint = "; multiply values of 0..1 by 255 and round" if np.issubdtype(array.dtype, np.floating) else ""
        raise ValueError(f"{name} is not an image; expected uint8, uint16 or bool{hint}")
    if array.shape[0] * array.shape[1] > MAX_PIXELS:
        raise ValueError(f"{name} is too large; at most {MAX_PIXELS} pixels are supported")
    if array.ndim == 3 and array.shape[-1] == 1:
        array = array[..., 0]
    return _on_white(Image.fromarray(np.ascontiguousarray(array)))
