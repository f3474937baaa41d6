"""Formats of exchanged rows: what is written and read, against ml_dtypes and hand figures."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ernie_jax.parallel.quantized_rows import FP8_TILES, INT8_ROWS, INT8_TILES, ROW_FORMATS, row_format

RNG = np.random.default_rng(0)


def there_and_back(name, rows):
    """Read after write, compiled as an exchange has it: without compiling, nothing is flushed to zero."""
    row = ROW_FORMATS[name]
    return np.asarray(jax.jit(lambda x: row.read(row.write(x), x.shape[-1], x.dtype))(rows))


@pytest.mark.parametrize("columns", [5, 128, 130, 300])
def test_fp8_rows_are_tiles_of_128_with_a_scale_each(columns):
    rows = (RNG.normal(size=(7, columns)) * 10.0 ** RNG.integers(-6, 6, (7, 1))).astype(np.float32)
    rows[2] = 0.0
    rows[3, :128] = 0.0
    expected = np.zeros_like(rows)
    for start in range(0, columns, 128):
        tile = rows[:, start : start + 128]
        scale = (np.abs(tile).max(1, keepdims=True) / np.float32(448)).astype(np.float32)
        scale[scale == 0] = 1
        expected[:, start : start + 128] = (tile / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
    values, scales = FP8_TILES.quantize(jnp.asarray(rows))
    assert values.dtype == jnp.float8_e4m3fn and scales.shape == (7, -(-columns // 128))
    assert scales[2].tolist() == [1.0] * scales.shape[1]
    np.testing.assert_allclose(there_and_back("fp8", rows), expected, rtol=1e-6)
    # Half a step of three bits of mantissa, of the tile's largest value or of the smallest normal one.
    assert np.abs(expected - rows).max() <= np.abs(rows).max() / 2**4


def test_int8_rows_by_hand():
    rows = jnp.asarray([[127.0, -63.5, 0.4, 0.6], [0.0, 0.0, 0.0, 0.0], [-2.54, 1.26, 0.004, 0.0]])
    values, scale = INT8_ROWS.quantize(rows)
    assert values.tolist() == [[127, -64, 0, 1], [0, 0, 0, 0], [-127, 63, 0, 0]]
    np.testing.assert_allclose(scale[:, 0], [1.0, 1.0, 0.02], rtol=1e-6)
    np.testing.assert_allclose(there_and_back("int8", rows)[0], [127.0, -64.0, 0.0, 1.0])


def test_a_scale_a_tile_keeps_small_values_beside_large_ones():
    row = jnp.concatenate([jnp.full((128,), 1000.0), jnp.full((128,), 0.5)])[None]
    assert INT8_TILES.dequantize(*INT8_TILES.quantize(row))[0, 200] == pytest.approx(0.5, rel=1e-6)
    assert INT8_ROWS.dequantize(*INT8_ROWS.quantize(row))[0, 200] == 0.0
    assert INT8_TILES.width(256) == 264 and INT8_ROWS.width(256) == 260


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_numbers_at_the_edges(name):
    """What is not finite is not finite when read; what no scale can hold is zero, not NaN."""
    tiny = np.finfo(np.float32).tiny
    rows = np.asarray([[1.0, np.nan, 0.0], [np.inf, 1.0, 0.0], [tiny, 0.0, -tiny], [3e38, -1.0, 0.0]], np.float32)
    read = there_and_back(name, rows)
    assert not np.isfinite(read[0]).all() and not np.isfinite(read[1]).all()
    np.testing.assert_array_equal(read[2], 0.0)
    np.testing.assert_allclose(read[3], [3e38, 0.0, 0.0], rtol=1e-6)


@pytest.mark.parametrize("name", ROW_FORMATS)
def test_zero_words_read_as_zeros_and_widths_are_as_said(name):
    row = ROW_FORMATS[name]
    for columns in (1, 128, 129):
        words = row.write(jnp.ones((2, columns)))
        assert words.shape == (2, row.width(columns)) and words.dtype == row.word
        np.testing.assert_array_equal(row.read(jnp.zeros_like(words), columns, jnp.dtype("float32")), 0.0)
    assert row_format(name, jnp.dtype("bfloat16")) is row


def test_plain_formats_keep_every_bit():
    rows = RNG.normal(size=(3, 9)).astype(np.float32)
    np.testing.assert_array_equal(there_and_back("float32", rows), rows)
    np.testing.assert_array_equal(there_and_back("bfloat16", rows), rows.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_names_of_formats():
    assert row_format("compute", jnp.dtype("bfloat16")) is row_format(None, jnp.dtype("bfloat16")) is ROW_FORMATS["bfloat16"]
    with pytest.raises(ValueError, match=r"unknown exchange format 'fp4'; expected None, 'compute' or one of"):
        row_format("fp4", jnp.dtype("float32"))
