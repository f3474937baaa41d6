import io
import json

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from ernie_jax.data.vision import ImageProcessor, num_tokens

TINY = ImageProcessor(patch_size=4, merge_size=2, min_pixels=64, max_pixels=64 * 64)


def test_the_reference_image(golden):
    reference = load_file(golden / "vl" / "image_processor_pil.safetensors")
    found = ImageProcessor()(reference["image_uint8_hwc"])
    assert [list(found.grid_thw)] == reference["image_grid_thw"].tolist() == [[1, 8, 10]]
    assert found.pixel_values.dtype == np.float32 and found.pixel_values.shape == (80, 588)
    np.testing.assert_allclose(found.pixel_values, reference["pixel_values"], atol=5e-7, rtol=0)
    assert found.kind == "image" and found.timestamps == ()
    assert num_tokens(found.grid_thw, 2, kind="image") == 20


def test_an_image_taken_sideways():
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    Image.new("RGB", (640, 480), (200, 100, 50)).save(file, "JPEG", exif=exif)
    assert ImageProcessor()(file.getvalue()).grid_thw == (1, 46, 34)


def test_transparent_black_is_white():
    file = io.BytesIO()
    Image.new("RGBA", (56, 56), (0, 0, 0, 0)).save(file, "PNG")
    red, green, blue = ImageProcessor()(file.getvalue()).pixel_values[0].reshape(3, 196)[:, 0]
    # (1 - mean) / deviation of each channel.
    np.testing.assert_allclose([red, green, blue], [1.930336, 2.074888, 2.145897], atol=1e-5)


def test_pixels_of_a_tiny_model_by_hand():
    # 8x16: one row of two merge blocks; nothing is resized, so each pixel is where its formula says.
    image = np.random.default_rng(0).integers(0, 256, (8, 16, 3), np.uint8)
    found = TINY(image)
    assert found.grid_thw == (1, 2, 4)
    patch = found.pixel_values.reshape(2, 2, 2, 3, 4, 4)  # block across, row and column in it, channel, row, column
    for x, y, channel in ((0, 0, 0), (5, 2, 1), (9, 6, 2), (15, 7, 0), (12, 3, 1)):
        value = (image[y, x, channel] / 255 - TINY.image_mean[channel]) / TINY.image_std[channel]
        assert patch[x // 8, y // 4, x % 8 // 4, channel, y % 4, x % 4] == pytest.approx(value, abs=1e-6)


def test_steps_left_out():
    image = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)
    plain = ImageProcessor(patch_size=4, do_resize=False, do_rescale=False, do_normalize=False)(image)
    assert plain.pixel_values[0, :4].tolist() == [0.0, 3.0, 6.0, 9.0]
    halves = ImageProcessor(patch_size=4, do_resize=False, do_normalize=False, rescale_factor=0.5)(image)
    np.testing.assert_array_equal(halves.pixel_values, plain.pixel_values / 2)
    with pytest.raises(ValueError, match=r"\(12, 8, 3\).* do_resize is off and the size 12x8 does not divide by .* 8"):
        ImageProcessor(patch_size=4, do_resize=False)(np.zeros((12, 8, 3), np.uint8))


def test_the_filter_is_the_one_named():
    edge = np.zeros((64, 64, 3), np.uint8)
    edge[:, 31:] = 255
    shrink = {"patch_size": 4, "min_pixels": 64, "max_pixels": 256, "do_normalize": False, "do_rescale": False}
    levels = {
        name: set(ImageProcessor(resample=n, **shrink)(edge).pixel_values.ravel()) for n, name in ((0, "nearest"), (3, "bicubic"))
    }
    assert levels["nearest"] == {0.0, 255.0}
    assert len(levels["bicubic"]) > 2


def test_an_image_that_cannot_be_resized_is_named(tmp_path):
    path = tmp_path / "strip.png"
    Image.new("L", (201, 1)).save(path)
    with pytest.raises(ValueError, match=r"strip\.png: the image is 1 high and 201 wide"):
        ImageProcessor()(path)


def test_saved_and_read_back(tmp_path):
    processor = ImageProcessor(patch_size=4, min_pixels=64, max_pixels=4096, image_mean=(0.5, 0.4, 0.3), resample=2)
    processor.save(tmp_path / "new")
    assert ImageProcessor.from_folder(tmp_path / "new") == processor
    assert ImageProcessor.from_folder(tmp_path / "new", resample=3, max_pixels=8192).max_pixels == 8192
    assert ImageProcessor.from_folder(tmp_path) == ImageProcessor()


@pytest.mark.parametrize(
    ("config", "bounds"),
    [
        ({"size": {"shortest_edge": 100, "longest_edge": 900}}, (100, 900)),
        ({"size": {"min_pixels": 100, "max_pixels": 900}}, (100, 900)),
        ({"min_pixels": 100, "max_pixels": 900}, (100, 900)),
        ({"min_pixels": 100, "max_pixels": 900, "size": {"height": 224, "width": 224}}, (100, 900)),
        ({"max_pixels": 9000, "size": {"shortest_edge": 100, "longest_edge": 900}}, (100, 9000)),
        ({"size": None, "min_pixels": None, "crop_size": None, "do_center_crop": False, "do_pad": None}, (3136, 4842768)),
    ],
)
def test_layouts_of_the_file(config, bounds, tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**config, "patch_size": 16, "processor_class": "X"}))
    found = ImageProcessor.from_folder(tmp_path)
    assert (found.min_pixels, found.max_pixels) == bounds
    assert found.patch_size == 16
    # The newer layout has all processors in one file, which is asked first.
    both = {"image_processor": {"patch_size": 8}, "video_processor": {"patch_size": 32}}
    (tmp_path / "processor_config.json").write_text(json.dumps(both))
    assert ImageProcessor.from_folder(tmp_path) == ImageProcessor(patch_size=8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"size": {"height": 224, "width": 224}}', "expected shortest_edge and longest_edge"),
        ('{"size": 224}', "size is 224"),
        ('{"do_center_crop": true}', "do_center_crop is True, which is not supported"),
        ('{"do_convert_rgb": false}', "do_convert_rgb is false"),
        ('{"resample": 9}', "resample is 9"),
        ('{"image_mean": [0.5]}', r"image_mean is \[0.5\]; expected three numbers"),
        ('{"image_std": [1, 0, 1]}', "image_std is"),
        ('{"patch_size": "14"}', "patch_size is '14'"),
        ('{"min_pixels": 5000000, "max_pixels": 3}', "min_pixels 5000000 is above max_pixels 3"),
        ("[1]", "holds a list"),
        ("{", "is not JSON"),
    ],
)
def test_files_that_ask_for_something_else(text, message, tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        ImageProcessor.from_folder(tmp_path)
    assert "preprocessor_config.json" in str(caught.value)


def test_no_folder(tmp_path):
    with pytest.raises(ValueError, match="is not a folder"):
        ImageProcessor.from_folder(tmp_path / "none")


@pytest.mark.parametrize(
    "setting", [{"image_mean": ["a", 1, 2]}, {"image_std": [None, 1, 1]}, {"rescale_factor": "x"}, {"do_resize": "no"}], ids=str
)
def test_a_file_with_settings_of_another_type(tmp_path, setting):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(setting))
    with pytest.raises(ValueError, match=f"preprocessor_config.json: {next(iter(setting))} is "):
        ImageProcessor.from_folder(tmp_path)
