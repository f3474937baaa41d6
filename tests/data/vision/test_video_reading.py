import base64
import io
import struct
import sys

import av
import numpy as np
import pytest
from PIL import Image

from ernie_jax.data.vision import open_video
from ernie_jax.data.vision.containers import scan_video


def frame(index, height=48, width=64):
    """A frame that tells its index by its red, on noise in blue that makes every frame differ from the one before."""
    noise = np.random.default_rng(index).integers(0, 256, (height // 8, width // 8), np.uint8).repeat(8, 0).repeat(8, 1)
    return np.stack([np.full((height, width), index, np.uint8), np.full((height, width), 100, np.uint8), noise], -1)


def video_bytes(count, *, container="mp4", codec="libx264", rate=25, frames=frame, pts=None, pix_fmt="yuv444p", **options):
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate, options={key.rstrip("_"): str(value) for key, value in options.items()})
        stream.height, stream.width, _ = frames(0).shape
        stream.pix_fmt = pix_fmt
        for index in range(count):
            picture = av.VideoFrame.from_ndarray(frames(index), format="rgb24")
            picture.pts = index if pts is None else pts[index]
            output.mux(stream.encode(picture))
        output.mux(stream.encode(None))
    return file.getvalue()


X264 = {"crf": 1, "g": 12, "bf": 3, "x264-params": "b-adapt=0:scenecut=0:open-gop=1"}


def indices_seen(frames):
    return [round(float(np.median(pixels[..., 0]))) for pixels in frames]


@pytest.fixture(scope="module")
def mp4():
    return video_bytes(100, **X264)


def test_mp4_through_every_entry(mp4, tmp_path):
    path = tmp_path / "clip.mp4"
    path.write_bytes(mp4)
    for source in (str(path), path, mp4, io.BytesIO(mp4)):
        video = open_video(source)
        assert video.num_frames == 100
        assert video.frame_rate == 25
        np.testing.assert_allclose(video.times, np.arange(100) / 25, atol=1e-6)
        (pixels,) = video.read([37])
        assert pixels.shape == (48, 64, 3) and pixels.dtype == np.uint8
        assert np.abs(pixels.astype(int) - frame(37)).mean() < 4


@pytest.mark.parametrize(
    "wanted",
    [
        [0],
        [99],
        [12],
        [11, 12, 13],
        [3, 40, 41, 90],
        [50, 50, 51],
        list(range(100)),
        list(range(0, 100, 9)),
        list(range(5, 100, 24)),
    ],
)
def test_seeking_finds_the_very_frame(mp4, wanted):
    assert indices_seen(open_video(mp4).read(wanted)) == wanted


def test_words_about_a_file_in_no_known_encoding_do_not_matter(mp4):
    assert b"Lavf" in mp4
    assert indices_seen(open_video(mp4.replace(b"Lavf", b"\xff\xfe\xe9\xe8")).read([2])) == [2]


def test_what_is_not_sampled_is_not_decoded(mp4):
    # Packets far from frames 2 and 50 are wiped out, and cannot be decoded.
    with av.open(io.BytesIO(mp4)) as container:
        packets = [(packet.pts, packet.pos, packet.size) for packet in container.demux(video=0) if packet.size]
    step = sorted(pts for pts, _, _ in packets)[1] - sorted(pts for pts, _, _ in packets)[0]
    wiped = bytearray(mp4)
    for pts, position, size in packets:
        if not (pts // step <= 12 or 36 <= pts // step <= 60):
            wiped[position : position + size] = bytes(size)
    video = open_video(bytes(wiped))
    assert indices_seen(video.read([2, 50])) == [2, 50]
    with pytest.raises(ValueError, match="corrupt"):
        list(video.read([2, 30]))


@pytest.mark.parametrize(
    ("container", "codec", "options"),
    [
        ("matroska", "libx264", X264),
        ("avi", "mpeg4", {"g": 12, "bf": 2, "q": 2, "pix_fmt": "yuv420p"}),
        ("avi", "mjpeg", {"q": 2, "pix_fmt": "yuvj420p"}),
        ("mpegts", "libx264", X264),
        ("h264", "libx264", X264),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_other_containers(container, codec, options):
    contents = video_bytes(60, container=container, codec=codec, **options)
    with av.open(io.BytesIO(contents)) as opened:
        expected = [picture.to_ndarray(format="rgb24") for picture in opened.decode(video=0)]
    video = open_video(contents)
    assert video.num_frames == len(expected) == 60
    assert video.frame_rate == 25
    np.testing.assert_allclose(video.times, np.arange(60) / 25, atol=1e-3)
    for wanted in ([0, 1, 17, 33, 59], [30], [59]):
        np.testing.assert_array_equal(list(video.read(wanted)), [expected[index] for index in wanted])


def test_times_of_a_video_whose_rate_varies():
    file = io.BytesIO()
    pts = [0, 1, 2, 10, 30, 31]
    with av.open(file, "w", format="matroska") as output:
        stream = output.add_stream("libx264", rate=10, options={"crf": "1"})
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv444p"
        for index, when in enumerate(pts):
            picture = av.VideoFrame.from_ndarray(frame(index), format="rgb24")
            picture.pts = when
            output.mux(stream.encode(picture))
        output.mux(stream.encode(None))
    video = open_video(file.getvalue())
    np.testing.assert_allclose(video.times, np.array(pts) / 10, atol=1e-3)
    assert indices_seen(video.read([3, 5])) == [3, 5]


# The display matrix of MP4, row by row in 16.16 fixed point (2.30 in the last column), and what it makes of a frame.
MATRICES = {
    90: ((0, 1, 0, -1, 0, 0, 48, 0, 1), lambda pixels: np.rot90(pixels, -1)),
    180: ((-1, 0, 0, 0, -1, 0, 64, 48, 1), lambda pixels: np.rot90(pixels, 2)),
    270: ((0, -1, 0, 1, 0, 0, 0, 64, 1), lambda pixels: np.rot90(pixels, 1)),
}


@pytest.mark.parametrize("turn", MATRICES)
def test_a_phone_held_upright(turn, mp4):
    matrix, shown = MATRICES[turn]
    upright = struct.pack(">9i", 65536, 0, 0, 0, 65536, 0, 0, 0, 1 << 30)
    head, track = mp4.split(b"tkhd")
    assert track.count(upright) == 1
    fixed = [value * (1 << 30 if place % 3 == 2 else 65536) for place, value in enumerate(matrix)]
    turned = head + b"tkhd" + track.replace(upright, struct.pack(">9i", *fixed))
    (plain,) = open_video(mp4).read([4])
    (pixels,) = open_video(turned).read([4])
    np.testing.assert_array_equal(pixels, shown(plain))


def gif(levels, durations, **options):
    file = io.BytesIO()
    images = [Image.fromarray(np.full((12, 16, 3), level, np.uint8)) for level in levels]
    images[0].save(file, options.pop("format", "GIF"), save_all=True, append_images=images[1:], duration=durations, **options)
    return file.getvalue()


@pytest.mark.parametrize("options", [{}, {"format": "PNG"}, {"format": "WEBP", "lossless": True}])
def test_animations(options):
    video = open_video(gif([0, 40, 80, 120], [100, 250, 50, 400], **options))
    assert video.times == pytest.approx([0, 0.1, 0.35, 0.4])
    assert float(video.frame_rate) == pytest.approx(4 / 0.8)
    assert indices_seen(video.read([0, 2, 3])) == [0, 80, 120]
    assert indices_seen(video.read([1, 1])) == [40, 40]


def test_an_animation_without_durations_shows_ten_frames_a_second():
    assert open_video(gif([0, 40, 80], 0)).times == pytest.approx([0, 0.1, 0.2])


def test_see_through_frames_of_a_gif_lie_on_white():
    file = io.BytesIO()
    images = [Image.new("RGBA", (8, 8), (0, 0, 0, 0)), Image.new("RGBA", (8, 8), (0, 0, 200, 255))]
    images[0].save(file, "GIF", save_all=True, append_images=images[1:], duration=100, disposal=2)
    first, second = open_video(file.getvalue()).read([0, 1])
    assert first.min() == 255
    assert second[0, 0].tolist() == [0, 0, 200]


def test_a_folder_in_natural_order(tmp_path):
    for index in (1, 2, 10, 11, 100):
        Image.fromarray(frame(index)).save(tmp_path / f"frame{index}.png")
    (tmp_path / "notes.txt").write_text("not a frame")
    (tmp_path / ".hidden.png").write_text("not a frame")
    video = open_video(tmp_path)
    assert indices_seen(video.read(range(5))) == [1, 2, 10, 11, 100]
    assert video.frame_rate == 24
    assert open_video(str(tmp_path), frame_rate=2).times == [0, 0.5, 1, 1.5, 2]


def test_lists_and_arrays(tmp_path):
    path = tmp_path / "frame.png"
    Image.fromarray(frame(3)).save(path)
    mixed = [frame(1), Image.fromarray(frame(2)), path, path.read_bytes()]
    assert indices_seen(open_video(mixed).read([0, 1, 2, 3])) == [1, 2, 3, 3]
    stacked = np.stack([frame(index) for index in range(5)])
    assert indices_seen(open_video(stacked).read([1, 4])) == [1, 4]
    assert open_video(stacked[..., 0]).num_frames == 5


@pytest.mark.parametrize("part", [0.02, 0.3, 0.9])
@pytest.mark.parametrize("options", [{}, {"movflags": "faststart"}])
def test_cut_short(part, options, tmp_path):
    contents = video_bytes(100, **X264, **options)
    path = tmp_path / "cut.mp4"
    path.write_bytes(contents[: int(len(contents) * part)])
    with pytest.raises(ValueError, match=r"cut\.mp4 .*cut short"):
        list(open_video(path).read([0, 99]))


def test_animations_cut_short():
    contents = gif([0, 40, 80], 100)
    with pytest.raises(ValueError, match=r"the file of \d+ bytes is a truncated or corrupt animation"):
        open_video(contents[: len(contents) // 2])


def sound():
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream = output.add_stream("aac", rate=44100)
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        silence.rate, silence.pts = 44100, 0
        output.mux(stream.encode(silence))
        output.mux(stream.encode(None))
    return file.getvalue()


def jpeg():
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "JPEG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (lambda: "no/such/clip.mp4", r"cannot open no/such/clip\.mp4: No such file"),
        (lambda: "https://example.org/a.mp4", "is a web address"),
        (lambda: b"", "is empty"),
        (lambda: b"not a video at all" * 100, "is not a video"),
        (lambda: b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n", "is not a video"),
        (lambda: b"ffconcat version 1.0\nfile /etc/hostname\n", "is not a video"),
        (jpeg, r"is a still image \(JPEG\); give it as an image"),
        (sound, "holds no video stream"),
        (list, "the list of 0 frames has no frames"),
        (lambda: np.zeros((8, 8, 3), np.uint8), "is not a video; expected"),
        (lambda: 5, "cannot read a video from a int"),
    ],
)
def test_sources_that_are_no_video(source, message):
    with pytest.raises(ValueError, match=message):
        open_video(source())


def test_a_folder_without_images(tmp_path):
    with pytest.raises(ValueError, match="has no frames; expected images"):
        open_video(tmp_path)


def test_a_rate_for_what_has_its_own(mp4):
    with pytest.raises(ValueError, match=r"frame_rate is 5, but .* is a file, which tells its own"):
        open_video(mp4, frame_rate=5)
    with pytest.raises(ValueError, match="frame_rate is 0"):
        open_video([frame(0)], frame_rate=0)


def test_pyav_missing(mp4, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ValueError, match=r"needs PyAV to be read; install it with: pip install 'ernie-jax\[video\]'"):
        open_video(mp4)
    # Animations and frames do without.
    assert open_video(gif([0, 40], 100)).num_frames == 2


def test_scan_tells_keyframes(mp4):
    scanned = scan_video(lambda: io.BytesIO(mp4), "clip")
    assert len(scanned.keys) >= 8
    assert scanned.pts is not None and set(dict(scanned.keys)) <= set(scanned.pts)


@pytest.mark.parametrize("name", ["~no-such-user-here/a.mp4", "nowhere://a.mp4", "a\0.mp4", "a" * 5000])
def test_names_that_no_video_can_have(name):
    with pytest.raises(ValueError, match=r"^cannot open "):
        open_video(name)


def test_a_video_in_a_data_url():
    file = io.BytesIO()
    stills = [Image.fromarray(frame(index, 16, 16)) for index in range(3)]
    stills[0].save(file, "WEBP", save_all=True, append_images=stills[1:], lossless=True, duration=50)
    url = "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode()
    video = open_video(url)
    assert list(video.times) == [0, 0.05, 0.1]
    assert [picture[0, 0, 0] for picture in video.read([0, 1, 2])] == [0, 1, 2]


def test_an_animation_that_claims_to_be_huge():
    file = io.BytesIO()
    Image.new("P", (4, 4)).save(file, "GIF")
    claimed = bytearray(file.getvalue())
    claimed[6:10] = struct.pack("<HH", 65535, 65535)
    with pytest.raises(ValueError, match="too large"):
        open_video(bytes(claimed))


def test_an_endless_frame_rate():
    with pytest.raises(ValueError, match="frame_rate is inf"):
        open_video(np.zeros((2, 8, 8, 3), np.uint8), frame_rate=float("inf"))
