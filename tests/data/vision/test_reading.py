import base64
import io
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from etils import epath
from PIL import Image

from ernie_jax.data.vision import read_image

WHITE, BLACK = [255, 255, 255], [0, 0, 0]


def picture(height=12, width=20, seed=0):
    """Blocks of strong colours, so that a turn or a swap of channels cannot go unseen."""
    blocks = np.random.default_rng(seed).integers(0, 256, (height // 4, width // 4, 3), np.uint8)
    return blocks.repeat(4, 0).repeat(4, 1)


def encoded(image, file_format, **options):
    file = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(file, file_format, **options)
    return file.getvalue()


def every_entry(contents, folder):
    """The same file through every way in."""
    path = folder / "image.bin"
    path.write_bytes(contents)
    yield str(path)
    yield path
    yield epath.Path(path)
    yield contents
    yield bytearray(contents)
    yield memoryview(contents)
    yield io.BytesIO(contents)
    with path.open("rb") as file:
        yield file
    yield "data:image/png;base64," + base64.b64encode(contents).decode()
    with Image.open(io.BytesIO(contents)) as image:
        yield image


def modes():
    """Images of every mode, and the RGB [H, W, 3] each stands for, found without Pillow's conversions."""
    rgb = picture()
    grey = np.arange(240, dtype=np.uint8).reshape(12, 20)
    alpha = np.arange(240, dtype=np.uint8)[::-1].reshape(12, 20)
    deep = (np.arange(240, dtype=np.uint16) * 273).reshape(12, 20)
    bits = (np.arange(240) % 3 == 0).reshape(12, 20)
    palette = picture(4, 12, seed=1)[0, ::4]  # three colours
    indices = (np.arange(240) % 3).astype(np.uint8).reshape(12, 20)

    def over_white(colour, alpha):
        weight = alpha[..., None] / 255
        return colour * weight + 255 * (1 - weight)

    paletted = Image.fromarray(indices)
    paletted.putpalette(palette.reshape(-1).tolist())
    three = grey[..., None].repeat(3, -1)
    cmyk = np.concatenate([255 - rgb, np.full((12, 20, 1), 51, np.uint8)], -1)
    yield "RGB", Image.fromarray(rgb), rgb, {}
    yield "L", Image.fromarray(grey), three, {}
    yield "LA", Image.frombytes("LA", (20, 12), np.stack([grey, alpha], -1).tobytes()), over_white(three, alpha), {}
    yield "RGBA", Image.fromarray(np.concatenate([rgb, alpha[..., None]], -1)), over_white(rgb, alpha), {}
    yield "P", paletted, palette[indices], {}
    # One colour of the palette see-through, and one half so.
    yield "P+tRNS", paletted, over_white(palette[indices], np.array([255, 0, 102])[indices]), {"transparency": bytes([255, 0, 102])}
    yield "L+tRNS", Image.fromarray(grey), np.where(grey[..., None] == 77, 255, three), {"transparency": 77}
    colour = tuple(int(x) for x in rgb[5, 9])
    yield "RGB+tRNS", Image.fromarray(rgb), np.where((rgb == colour).all(-1, keepdims=True), 255, rgb), {"transparency": colour}
    yield "I;16", Image.fromarray(deep), (deep >> 8)[..., None].repeat(3, -1), {}
    yield (
        "I;16+tRNS",
        Image.fromarray(deep),
        np.where(deep[..., None] == 2730, 255, (deep >> 8)[..., None].repeat(3, -1)),
        {"transparency": 2730},
    )
    yield "1", Image.fromarray(bits), np.where(bits, 255, 0)[..., None].repeat(3, -1), {}
    yield "CMYK", Image.frombytes("CMYK", (20, 12), cmyk.tobytes()), (255.0 - cmyk[..., :3]) * (255 - 51) / 255, {"format": "TIFF"}


@pytest.mark.parametrize("case", range(12))
def test_every_mode_through_every_entry(case, tmp_path):
    name, image, expected, options = list(modes())[case]
    contents = encoded(image, options.pop("format", "PNG"), **options)
    for source in every_entry(contents, tmp_path):
        found = read_image(source)
        assert found.dtype == np.uint8 and found.shape == (12, 20, 3) and found.flags["C_CONTIGUOUS"]
        # Pillow rounds when it lays one image on another, and again in CMYK.
        np.testing.assert_allclose(found, expected, atol=1.01, err_msg=f"{name} through {type(source).__name__}")


@pytest.mark.parametrize(
    ("file_format", "options"), [("PNG", {}), ("WEBP", {"lossless": True}), ("BMP", {}), ("TIFF", {}), ("PPM", {})]
)
def test_lossless_formats_give_the_very_pixels(file_format, options):
    np.testing.assert_array_equal(read_image(encoded(picture(), file_format, **options)), picture())


@pytest.mark.parametrize("file_format", ["JPEG", "WEBP"])
def test_lossy_formats_come_near(file_format):
    smooth = np.linspace(0, 255, 64).astype(np.uint8)[None, :, None].repeat(48, 0).repeat(3, 2)
    found = read_image(encoded(smooth, file_format, quality=95))
    assert np.abs(found.astype(int) - smooth).max() <= 8


@pytest.mark.parametrize("file_format", ["PNG", "PPM"])
def test_sixteen_bit_grey_is_not_clipped(file_format):
    deep = np.array([[0, 255, 256, 32768, 65535]], np.uint16)
    found = read_image(encoded(deep, file_format))
    assert found[0, :, 0].tolist() == [0, 0, 1, 128, 255]
    np.testing.assert_array_equal(found, read_image(deep))


def test_sixteen_bit_colour_takes_the_upper_byte_too():
    deep = np.array([[[0, 256, 65535], [511, 32768, 4660]]], ">u2")
    rows = b"".join(b"\x00" + row.tobytes() for row in deep)
    found = read_image(png(2, 1, bit_depth=16, colour_type=2, rows=rows))
    assert found.tolist() == [[[0, 1, 255], [1, 128, 18]]]
    np.testing.assert_array_equal(found, read_image(deep.astype(np.uint16)))


# What a camera must have done to the upright picture for each tag (EXIF 2.3, 4.6.4): where its row 0 and column 0 lie.
STORED = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, 1),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: np.rot90(a, -1),
}


@pytest.mark.parametrize("file_format", ["PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_undone(orientation, file_format, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if file_format == "WEBP" else {}
    contents = encoded(np.ascontiguousarray(STORED[orientation](picture())), file_format, exif=exif, **options)
    for source in every_entry(contents, tmp_path):
        np.testing.assert_array_equal(read_image(source), picture())


def test_orientation_of_a_jpeg():
    exif = Image.Exif()
    exif[0x0112] = 6
    upright = picture(16, 32)
    found = read_image(encoded(np.ascontiguousarray(np.rot90(upright)), "JPEG", exif=exif, quality=100, subsampling=0))
    assert found.shape == (16, 32, 3)
    assert np.abs(found.astype(int) - upright).mean() < 4


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize(
    "notes", [b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\x7f", b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x02\xff\xff"]
)
def test_unreadable_camera_notes_leave_the_picture_as_it_is(notes):
    contents = encoded(picture(), "JPEG", exif=notes)
    np.testing.assert_array_equal(read_image(contents), read_image(encoded(picture(), "JPEG")))


@pytest.mark.parametrize("file_format", ["GIF", "PNG", "WEBP", "TIFF"])
def test_the_first_frame_of_an_animation(file_format):
    frames = [Image.fromarray(np.full((8, 8, 3), level, np.uint8)) for level in (10, 120, 250)]
    options = {"lossless": True} if file_format == "WEBP" else {}
    contents = encoded(frames[0], file_format, save_all=True, append_images=frames[1:], **options)
    assert np.unique(read_image(contents)).tolist() == [10]
    with Image.open(io.BytesIO(contents)) as image:
        image.seek(1)
        assert np.unique(read_image(image)).tolist() == [120]
        assert image.tell() == 1


def test_arrays():
    grey = picture()[..., 0]
    for array in (grey, grey[..., None], grey[..., None].repeat(3, -1), grey.T.copy().T):
        np.testing.assert_array_equal(read_image(array), grey[..., None].repeat(3, -1))
    assert read_image(np.array([[True, False]])).tolist() == [[WHITE, BLACK]]
    assert read_image(np.array([[[0, 0, 0, 0], [0, 0, 0, 255], [200, 0, 0, 51]]], np.uint8)).tolist() == [
        [WHITE, BLACK, [244, 204, 204]]
    ]
    # The result is the caller's own.
    source = picture()
    read_image(source)[:] = 0
    np.testing.assert_array_equal(source, picture())


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((4, 4), np.float32), r"\(4, 4\) and type float32 .*multiply values of 0..1 by 255"),
        (np.zeros((4, 4), np.int64), "expected uint8, uint16 or bool$"),
        (np.zeros((3, 8, 8), np.uint8), "move the channels last"),
        (np.zeros((8, 8, 2), np.uint8), "is not an image; expected"),
        (np.zeros(8, np.uint8), "is not an image; expected"),
        (np.zeros((0, 8, 3), np.uint8), "has no pixels"),
    ],
)
def test_arrays_that_are_no_image(array, message):
    with pytest.raises(ValueError, match=message):
        read_image(array)


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
@pytest.mark.parametrize("part", [0.05, 0.5, 0.9])
def test_truncated_files_are_named(file_format, part, tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    contents = encoded(noise, file_format)
    path = tmp_path / "cut.img"
    path.write_bytes(contents[: int(len(contents) * part)])
    with pytest.raises(ValueError, match=r"cut\.img .*(cut short|truncated|corrupt)"):
        read_image(path)


def png(width, height, *, bit_depth=8, colour_type=0, rows=b""):
    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, bit_depth, colour_type, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("size", "kind"), [((50_000, 50_000), "error"), ((10_000, 9_000), "ignore"), ((14_000, 14_000), "error")])
def test_a_small_file_that_claims_too_many_pixels(size, kind):
    with warnings.catch_warnings():
        warnings.simplefilter(kind)
        with pytest.raises(ValueError, match="is too large"):
            read_image(png(*size))


def test_broken_bytes_never_raise_anything_else():
    generator = np.random.default_rng(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of some broken tags
        for file_format in ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"):
            contents = bytearray(encoded(picture(), file_format))
            for _ in range(60):
                broken = bytearray(contents)
                for place in generator.integers(0, len(broken), 3):
                    broken[place] = generator.integers(256)
                try:
                    assert read_image(bytes(broken)).shape[-1] == 3
                except ValueError as error:
                    assert "bytes" in str(error)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("no/such/photo.png", r"cannot open no/such/photo\.png: No such file"),
        ("https://example.org/a.png", "is a web address; download it first"),
        (b"", "the file of 0 bytes is empty"),
        (b"%PDF-1.7 not a picture", r"is not an image \(PNG, JPEG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is not an image"),
        (png(0, 5), "corrupt|no pixels|not an image"),
        ("data:image/png;base64,@@@@", "is not valid base64"),
        ("data:image/png,abc", "is not of the form"),
        (io.StringIO("text"), "is opened as text"),
        (Image.new("RGB", (0, 5)), "has no pixels: 0 wide and 5 high"),
        (Image.new("F", (4, 4)), "pixels of mode F"),
        (Image.new("I", (4, 4)), "pixels of mode I"),
        (17, "cannot read an image from a int; expected a path"),
        (None, "cannot read an image"),
    ],
)
def test_sources_that_are_no_image(source, message):
    with pytest.raises(ValueError, match=message):
        read_image(source)


def test_a_folder_is_no_image(tmp_path):
    with pytest.raises(ValueError, match="cannot open"):
        read_image(Path(tmp_path))


@pytest.mark.parametrize("name", ["~no-such-user-here/a.png", "nowhere://a.png", "a\0.png", "data:image/png;base64,é"])
def test_names_that_no_file_can_have(name):
    with pytest.raises(ValueError, match=r"^(cannot open|the data URL) "):
        read_image(name)
