from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ernie_jax.data.vision import sample_frames


def test_even_takes_all_of_a_short_video_and_180_of_a_long_one():
    assert sample_frames(5, 25) == [0, 1, 2, 3, 4]
    assert sample_frames(180, 25) == list(range(180))
    assert sample_frames(360, 25) == list(range(0, 360, 2))
    assert sample_frames(1000, 25)[:5] == [0, 5, 11, 16, 22]  # 1000 / 180 = 5.56
    assert len(sample_frames(1000, 25)) == 180


def test_even_with_a_number_or_a_rate():
    assert sample_frames(20, 25, num_frames=16) == [0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13, 15, 16, 17, 18]
    # 250 frames at 25 a second, 2 a second: every 12.5th.
    assert sample_frames(250, 25, fps=2) == [
        0,
        12,
        25,
        37,
        50,
        62,
        75,
        87,
        100,
        112,
        125,
        137,
        150,
        162,
        175,
        187,
        200,
        212,
        225,
        237,
    ]
    # 5 would be too few: 16 at least.
    assert len(sample_frames(250, 25, fps=0.5)) == 16
    # 134 / 25 * 3 = 16.08 frames, the step is 25/3 exactly: 17 fit.
    assert sample_frames(134, 25, fps=3)[:4] == [0, 8, 16, 25]
    assert len(sample_frames(134, 25, fps=3)) == 17


def test_middle_of_each_half_second():
    # 10 s at 24 a second: 0.25 s, 0.75 s, ... = frames 6, 18, ...
    assert sample_frames(240, 24, sampling="middle") == list(range(6, 240, 12))
    # At 30 a second 7.5 lies half-way: the even neighbour is taken.
    assert sample_frames(300, 30, sampling="middle")[:4] == [8, 22, 38, 52]
    assert sample_frames(300, Fraction(30000, 1001), sampling="middle")[:4] == [7, 22, 37, 52]


def test_middle_of_intervals_where_the_rate_gives_too_few_or_too_many():
    # 4 s would give 8 frames: 16 intervals of 6 frames, the middle of 0..5 rounded down.
    assert sample_frames(96, 24, sampling="middle") == list(range(2, 96, 6))
    assert sample_frames(10, 24, sampling="middle") == list(range(10))
    # 100 s would give 200 frames.
    assert len(sample_frames(2400, 24, sampling="middle")) == 180
    assert sample_frames(96, 24, sampling="middle", num_frames=16) == list(range(2, 96, 6))
    assert sample_frames(96, 24, sampling="middle", num_frames=32) == list(range(1, 96, 3))


@given(
    total=st.integers(1, 2000),
    rate=st.floats(1, 120),
    fps=st.none() | st.floats(0.1, 60),
    sampling=st.sampled_from(["even", "middle"]),
)
def test_indices_ascend_within_the_video(total, rate, fps, sampling):
    indices = sample_frames(total, rate, fps=fps, sampling=sampling)
    assert indices == sorted(indices)
    assert indices[0] >= 0 and indices[-1] < total
    assert len(indices) <= 181
    if sampling == "even":
        assert min(16, total) <= len(indices) <= 180
        assert len(set(indices)) == len(indices)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling": "random"}, "sampling is 'random'; expected one of even, middle"),
        ({"num_frames": 20, "fps": 2}, "give one of them"),
        ({"num_frames": 8}, "num_frames is 8; expected min_frames 16 to max_frames 180"),
        ({"num_frames": 200}, "num_frames is 200"),
        ({"num_frames": 60}, "num_frames is 60, but the video has 50 frames"),
        ({"min_frames": 0}, "expected 1 <= min_frames"),
        ({"min_frames": 20, "max_frames": 10}, "expected 1 <= min_frames <= max_frames"),
        ({"fps": 0}, "fps is 0; expected a number above 0"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        sample_frames(50, 25, **options)


def test_a_video_without_frames():
    with pytest.raises(ValueError, match="a video of 0 frames"):
        sample_frames(0, 25)


@pytest.mark.parametrize("change", [{"num_frames": "8"}, {"min_frames": None}, {"max_frames": 7.5}, {"fps": "2"}])
def test_settings_of_another_type(change):
    with pytest.raises(ValueError, match=f"{next(iter(change))} is "):
        sample_frames(20, 25, **change)
