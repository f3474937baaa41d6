import pytest
from hypothesis import given
from hypothesis import strategies as st

from ernie_jax.data.vision import smart_resize

IMAGE = {"factor": 28, "min_pixels": 56 * 56, "max_pixels": 6177 * 28 * 28}
VIDEO = {"factor": 28, "min_pixels": 299 * 28 * 28, "max_pixels": 1196 * 28 * 28}


# Computed with transformers 5.24.
@pytest.mark.parametrize(
    ("size", "rule", "expected"),
    [
        ((100, 150), IMAGE, (112, 140)),
        ((28, 28), IMAGE, (56, 56)),
        ((10, 300), IMAGE, (28, 308)),
        ((2000, 3000), IMAGE, (1792, 2688)),
        ((5000, 100), IMAGE, (5012, 112)),
        ((4000, 4000), IMAGE, (2184, 2184)),
        ((100, 150), VIDEO, (420, 616)),
        ((1, 1), IMAGE, (56, 56)),
        ((1, 200), IMAGE, (28, 812)),
        ((42, 70), IMAGE, (56, 56)),
    ],
)
def test_sizes_of_the_reference(size, rule, expected):
    assert smart_resize(*size, **rule) == expected


@pytest.mark.parametrize("size", [(1, 201), (201, 1), (10, 2001)])
def test_too_long(size):
    with pytest.raises(ValueError, match=rf"{size[0]} high and {size[1]} wide, an aspect ratio of 20.*at most 200"):
        smart_resize(*size, **IMAGE)


@pytest.mark.parametrize("size", [(0, 5), (5, 0)])
def test_no_pixels(size):
    with pytest.raises(ValueError, match="has no pixels"):
        smart_resize(*size, **IMAGE)


@given(height=st.integers(1, 5000), width=st.integers(1, 5000), factor=st.sampled_from([8, 28]))
def test_every_size_divides_and_stays_within_the_bounds(height, width, factor):
    if max(height, width) > 200 * min(height, width):
        return
    bounds = {"min_pixels": 4 * factor**2, "max_pixels": 1000 * factor**2}
    new_height, new_width = smart_resize(height, width, factor=factor, **bounds)
    assert new_height >= factor and new_width >= factor
    assert new_height % factor == 0 and new_width % factor == 0
    assert new_height * new_width >= bounds["min_pixels"]
    # Only where a side had to be kept at one factor may there be more pixels than asked for.
    assert new_height * new_width <= bounds["max_pixels"] or factor in (new_height, new_width)
    assert (height >= width) == (new_height >= new_width) or new_height == new_width
