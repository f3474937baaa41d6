import io
import json
from pathlib import Path

import av
import matplotlib
import numpy as np
import pytest
from PIL import Image, ImageFont

from ernie_jax.data.vision import ImageProcessor, VideoProcessor, draw_timestamp, format_timestamp, num_tokens, read_image

SMALL = {"patch_size": 4, "merge_size": 2, "min_pixels": 64, "max_pixels": 32 * 32}
PLAIN = VideoProcessor(**SMALL, draw_timestamps=False)


def frames(count, height=24, width=32):
    return [np.random.default_rng(index).integers(0, 256, (height, width, 3), np.uint8) for index in range(count)]


def test_each_frame_is_cut_like_an_image():
    video = PLAIN(frames(4), frame_rate=2)
    assert video.grid_thw == (4, 6, 8) and video.kind == "video"
    assert video.pixel_values.shape == (192, 48) and video.pixel_values.dtype == np.float32
    assert video.timestamps == (0, 0.5, 1, 1.5)
    images = [ImageProcessor(**SMALL)(frame).pixel_values for frame in frames(4)]
    np.testing.assert_array_equal(video.pixel_values, np.concatenate(images))
    assert num_tokens(video.grid_thw, 2, kind="video") == 24


def test_an_odd_number_of_frames_ends_with_the_last_one_twice():
    video = PLAIN(frames(3))
    assert video.grid_thw == (4, 6, 8)
    rows = video.pixel_values.reshape(4, 48, 48)
    np.testing.assert_array_equal(rows[3], rows[2])
    assert not np.array_equal(rows[2], rows[1])
    assert video.timestamps == pytest.approx((0, 1 / 24, 2 / 24, 2 / 24))
    assert PLAIN(frames(1)).grid_thw == (2, 6, 8)


def test_sizes_of_published_models():
    # 100x150 becomes 420x616 (transformers 5.24): 30x44 patches of 14.
    video = VideoProcessor(num_frames=2, min_frames=2)(np.zeros((6, 100, 150, 3), np.uint8))
    assert video.grid_thw == (2, 30, 44)
    assert video.pixel_values.shape == (2640, 588)
    assert num_tokens(video.grid_thw, 2, kind="video") == 330


def test_which_frames_are_taken():
    video = VideoProcessor(**SMALL, draw_timestamps=False, num_frames=16)(frames(20), frame_rate=10)
    assert video.timestamps == pytest.approx([index / 10 for index in (0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13, 15, 16, 17, 18)])
    original = VideoProcessor(**SMALL, draw_timestamps=False, sampling="middle", min_frames=2)(frames(20), frame_rate=8)
    # 2.5 s, two a second: 0.25, 0.75, ... s, of which there are 5.
    assert original.timestamps == (0.25, 0.75, 1.25, 1.75, 2.25, 2.25)


def test_an_mp4_and_its_frames_give_the_same():
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream = output.add_stream("libx264rgb", rate=4, options={"crf": "0"})
        stream.height, stream.width, stream.pix_fmt = 24, 32, "rgb24"
        for index, frame in enumerate(frames(21)):
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            picture.pts = index
            output.mux(stream.encode(picture))
        output.mux(stream.encode(None))
    for options in ({}, {"num_frames": 17}, {"sampling": "middle", "min_frames": 3}):
        processor = VideoProcessor(**SMALL, **options, draw_timestamps=False)
        found, expected = processor(file.getvalue()), processor(frames(21), frame_rate=4)
        assert found.timestamps == pytest.approx(expected.timestamps)
        np.testing.assert_array_equal(found.pixel_values, expected.pixel_values)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "time: 00:00:00.00"),
        (1.5, "time: 00:00:01.50"),
        (59.994, "time: 00:00:59.99"),
        (59.999, "time: 00:01:00.00"),
        (3725.25, "time: 01:02:05.25"),
    ],
)
def test_timestamp_text(seconds, text):
    assert format_timestamp(seconds) == text


def test_timestamps_are_black_on_a_white_edge_at_the_top_left():
    grey = np.full((200, 400, 3), 128, np.uint8)
    drawn = draw_timestamp(grey, 12.34)
    assert (grey == 128).all()
    changed = np.argwhere((drawn != 128).any(-1))
    (top, left), (bottom, right) = changed.min(0), changed.max(0)
    assert top < 10 and left < 10
    # 17 letters, a tenth of the shorter side high.
    assert 12 <= bottom - top <= 26 and 100 < right < 300
    assert (drawn == 0).all(-1).sum() > 100
    assert (drawn == 255).all(-1).sum() > 200
    assert not np.array_equal(drawn, draw_timestamp(grey, 12.35))


def test_timestamps_are_drawn_before_resizing_on_every_frame():
    clip = np.full((2, 200, 400, 3), 128, np.uint8)
    settings = {"patch_size": 4, "min_pixels": 64, "max_pixels": 80 * 160}
    stamped = VideoProcessor(**settings)(clip, frame_rate=1)
    by_hand = [ImageProcessor(**settings)(draw_timestamp(frame, second)).pixel_values for second, frame in enumerate(clip)]
    np.testing.assert_array_equal(stamped.pixel_values, np.concatenate(by_hand))


def font_file(tmp_path):
    """Some font file of its own: the one that matplotlib ships."""
    path = tmp_path / "Some.ttf"
    path.write_bytes(Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf").read_bytes())
    return path


def test_a_font_of_ones_own(tmp_path):
    font = font_file(tmp_path)
    grey = np.full((200, 400, 3), 128, np.uint8)
    drawn = draw_timestamp(grey, 1, str(font))
    assert not np.array_equal(drawn, draw_timestamp(grey, 1))
    # As wide as the font itself says, with an outline of 2 on each side.
    width = ImageFont.truetype(str(font), 20).getlength("time: 00:00:01.00")
    changed = np.argwhere((drawn != 128).any(-1))
    assert abs(changed.max(0)[1] - width) < 6
    with pytest.raises(ValueError, match=r"cannot open .*none\.ttf"):
        draw_timestamp(grey, 1, str(tmp_path / "none.ttf"))
    (tmp_path / "bad.ttf").write_text("no font")
    with pytest.raises(ValueError, match=r"bad\.ttf is not a font"):
        draw_timestamp(grey, 1, str(tmp_path / "bad.ttf"))


def test_frames_too_small_for_a_timestamp():
    with pytest.raises(ValueError, match=r"frame 0: a frame of 8x8 pixels is too small for a timestamp; set draw_timestamps=False"):
        VideoProcessor(**SMALL)(np.zeros((2, 8, 8, 3), np.uint8))


def test_frames_of_two_sizes():
    with pytest.raises(ValueError, match=r"the list of 2 frames: frame 1 is 24x40 pixels, frame 0 is 24x32"):
        PLAIN([*frames(1), *frames(1, width=40)])


def test_a_broken_frame_is_named(tmp_path):
    for index in range(3):
        Image.fromarray(frames(1)[0]).save(tmp_path / f"{index}.png")
    (tmp_path / "1.png").write_bytes((tmp_path / "1.png").read_bytes()[:500])
    with pytest.raises(ValueError, match=r"1\.png"):
        PLAIN(tmp_path)


def test_too_few_frames_are_named():
    with pytest.raises(ValueError, match="the list of 4 frames: num_frames is 16, but the video has 4"):
        VideoProcessor(**SMALL, num_frames=16)(frames(4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_frames": 20, "fps": 1}, "give one of them"),
        ({"sampling": "first"}, "sampling is 'first'"),
        ({"min_pixels": 10**9}, "min_pixels 1000000000 is above"),
    ],
)
def test_settings_that_contradict_each_other(options, message):
    with pytest.raises(ValueError, match=message):
        VideoProcessor(**options)


def test_saved_and_read_back(tmp_path):
    processor = VideoProcessor(**SMALL, num_frames=20, draw_timestamps=False)
    processor.save(tmp_path / "new")
    assert VideoProcessor.from_folder(tmp_path / "new") == processor
    assert VideoProcessor.from_folder(tmp_path) == VideoProcessor()
    # The font goes along.
    lettered = VideoProcessor(**SMALL, font=str(font_file(tmp_path)))
    lettered.save(tmp_path / "font")
    found = VideoProcessor.from_folder(tmp_path / "font")
    assert found.font == str(tmp_path / "font" / "Some.ttf")
    clip = np.full((2, 30, 60, 3), 128, np.uint8)
    np.testing.assert_array_equal(found(clip).pixel_values, lettered(clip).pixel_values)


def test_a_folder_that_names_a_font_it_lacks(tmp_path):
    config = {"video_processor": {"font": "Roboto-Regular.ttf", "fps": 2, "size": {"shortest_edge": 100, "longest_edge": 900}}}
    (tmp_path / "processor_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"Roboto-Regular\.ttf is missing; put it there, or pass font=None"):
        VideoProcessor.from_folder(tmp_path)
    assert VideoProcessor.from_folder(tmp_path, font=None) == VideoProcessor(fps=2, min_pixels=100, max_pixels=900)
    assert not VideoProcessor.from_folder(tmp_path, draw_timestamps=False).draw_timestamps


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"temporal_patch_size": 1}, "temporal_patch_size is 1; only 2 is supported"),
        ({"do_sample_frames": False}, "do_sample_frames is false"),
        ({"do_center_crop": True}, "do_center_crop is True"),
        ({"max_frames": 3}, "min_frames is 16 and max_frames 3"),
    ],
)
def test_files_that_ask_for_something_else(config, message, tmp_path):
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message) as caught:
        VideoProcessor.from_folder(tmp_path)
    assert "video_preprocessor_config.json" in str(caught.value)


def test_a_video_frame_and_the_same_image_give_equal_pixels():
    exif = Image.Exif()
    exif[0x0112] = 8
    file = io.BytesIO()
    Image.fromarray(frames(1)[0]).save(file, "PNG", exif=exif)
    video = PLAIN([file.getvalue()])
    image = ImageProcessor(**SMALL)(read_image(file.getvalue()))
    assert video.grid_thw == (2, 8, 6)
    np.testing.assert_array_equal(video.pixel_values[:48], image.pixel_values)
