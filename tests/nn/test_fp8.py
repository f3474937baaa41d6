"""The FP8 quantiser against a reading of its rule in NumPy: scales, rounding, edges, tiles cut short, what is counted."""

import logging

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ernie_jax.nn.fp8 import E4M3, E5M2, Quantized, count_losses, quantize, quantize_rows, requantized_by_tokens
from ernie_jax.nn.fp8.emulation import _announce, announce_emulation

FORMATS = {E4M3: (ml_dtypes.float8_e4m3fn, 448.0), E5M2: (ml_dtypes.float8_e5m2, 57344.0)}


def by_hand(x, dtype, height, width):
    """Tile by tile: (values as float32, scales), of x [n, m]."""
    kind, most = FORMATS[dtype]
    values = np.zeros(x.shape, np.float32)
    scales = np.zeros((-(-x.shape[0] // height), -(-x.shape[1] // width)), np.float32)
    for i, j in np.ndindex(scales.shape):
        part = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
        amax = np.abs(x[part]).max()
        scale = np.float32(1.0) if amax == 0 else np.float32(amax) * np.float32(1 / most)
        scales[i, j] = scale
        values[part] = np.clip(x[part] / scale, -most, most).astype(kind).astype(np.float32)
    return values, scales


def numbers(shape, seed=0):
    """Of very different sizes, so that some underflow; with a few zeros."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.exp2(rng.integers(-12, 6, shape))
    return np.where(rng.random(shape) < 0.05, 0, x).astype(np.float32)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("shape", "tile"), [((3, 128), (128,)), ((5, 300), (128,)), ((2, 7), (128,)), ((260, 300), (128, 128))])
def test_values_and_scales_are_exactly_those_of_the_rule(dtype, shape, tile):
    x = numbers(shape)
    got = jax.jit(lambda x: quantize(x, dtype, tile))(x)
    values, scales = by_hand(x, dtype, *(1, *tile)[-2:])
    assert got.values.dtype == dtype
    np.testing.assert_array_equal(got.scales, scales)
    np.testing.assert_array_equal(got.values.astype(jnp.float32), values)
    spread = np.repeat(np.repeat(scales, (1, *tile)[-2], 0), tile[-1], 1)[: shape[0], : shape[1]]
    np.testing.assert_array_equal(got.dequantize(), values * spread)


def test_rows_of_bfloat16_are_quantised_from_their_own_values():
    x = jnp.asarray(numbers((2, 3, 130)), jnp.bfloat16)
    values, scales = quantize_rows(x)
    assert (values.shape, scales.shape) == ((2, 3, 130), (2, 3, 2))
    expected, expected_scales = by_hand(np.asarray(x, np.float32).reshape(6, 130), E4M3, 1, 128)
    np.testing.assert_array_equal(values.astype(jnp.float32).reshape(6, 130), expected)
    np.testing.assert_array_equal(scales.reshape(6, 2), expected_scales)


def test_tiles_of_gate_and_up_are_apart():
    """Blocks of [E, D, 2, F] over D and F: the same as of each half alone."""
    x = numbers((2, 130, 2, 140))
    got = quantize(x, E4M3, (128, 1, 128))
    assert got.scales.shape == (2, 2, 2, 2)
    for expert, half in np.ndindex(2, 2):
        values, scales = by_hand(x[expert, :, half], E4M3, 128, 128)
        np.testing.assert_array_equal(got.values[expert, :, half].astype(jnp.float32), values)
        np.testing.assert_array_equal(got.scales[expert, :, half], scales)


def test_rounding_error_of_a_gaussian_is_that_of_three_and_of_two_bits():
    """Relative error 2.6% in E4M3 and 5.1% in E5M2, whatever an outlier in another tile does."""
    x = np.random.default_rng(0).normal(size=(512, 256)).astype(np.float32)
    x[:, 0] *= 1e4
    ordinary = x[:, 128:]
    for dtype, error in ((E4M3, 0.0257), (E5M2, 0.051)):
        back = np.asarray(quantize(x, dtype, (128,)).dequantize())[:, 128:]
        assert np.linalg.norm(back - ordinary) / np.linalg.norm(ordinary) == pytest.approx(error, rel=0.05)


@pytest.mark.parametrize("dtype", FORMATS)
def test_edges(dtype):
    x = np.zeros((6, 4), np.float32)
    x[1] = 1e-40  # below float32's normal numbers: as zero
    x[2] = [1e-37, 5e-38, 0, -1e-37]  # their quotient by 448 is below them
    x[3] = [np.nan, 1, 2, 3]
    x[4] = [np.inf, 1, 2, 3]
    x[5] = [3.4e38, -3.4e38, 1, 0]
    got = quantize(x, dtype, (128,))
    back = np.asarray(got.dequantize())
    np.testing.assert_array_equal(got.scales[:2], 1)
    np.testing.assert_array_equal(back[:2], 0)
    np.testing.assert_allclose(back[2], x[2], rtol=0.07)
    assert np.isnan(back[3]).all()
    assert np.isnan(back[4]).all()
    np.testing.assert_allclose(back[5], [3.4e38, -3.4e38, 0, 0], rtol=1e-6)


def test_largest_of_a_tile_is_kept_and_never_beyond():
    """The largest over its scale may round past 448: it saturates instead of becoming NaN, and comes back as it was."""
    x = np.random.default_rng(0).uniform(0.1, 10, (10_000, 1)).astype(np.float32)
    got = quantize(x, E4M3, (128,))
    np.testing.assert_allclose(got.scales, x / 448, rtol=2e-7)
    np.testing.assert_array_equal(got.values.astype(jnp.float32), 448)
    np.testing.assert_allclose(got.dequantize(), x, rtol=2e-7)


def test_tiles_along_tokens_begin_with_each_group():
    """Groups of 130, 0 and 5 rows after two rows of another kind: tiles of 128, 2 and 5 rows; spare NaN touches no tile."""
    x = numbers((140, 3))
    x[:2], x[137:] = np.nan, np.nan
    got = np.asarray(requantized_by_tokens(jnp.asarray(x), jnp.array([130, 0, 5]), jnp.int32(2), E4M3))
    for first, end in ((2, 130), (130, 132), (132, 137)):
        values, scales = by_hand(x[first:end], E4M3, 128, 1)
        np.testing.assert_array_equal(got[first:end], values * scales)
    assert np.isnan(got[:2]).all()
    assert np.isnan(got[137:]).all()


def test_counts_are_of_the_rows_that_belong():
    x = np.zeros((4, 130), np.float32)
    x[0] = [1.0] + [1e-7] * 127 + [0.0] * 2  # 1e-7 is below half of E4M3's smallest beside 1
    x[1, 0] = np.inf
    x[2] = 2.0
    x[3] = np.nan  # a spare row
    rows = jnp.array([True, True, True, False])
    counts = count_losses(jnp.asarray(x), quantize(x, E4M3, (128,)), rows)
    assert (int(counts.values), int(counts.saturated), int(counts.nonzero), int(counts.lost)) == (390, 1, 259, 127)
    assert float(counts.overflow) == pytest.approx(1 / 390)
    assert float(counts.underflow) == pytest.approx(127 / 259)


def test_emulation_is_said_once(caplog):
    _announce.cache_clear()
    with caplog.at_level(logging.WARNING):
        announce_emulation()
        announce_emulation()
    (record,) = [r for r in caplog.records if "FP8" in r.message]
    assert "emulated on cpu" in record.message


def test_a_quantised_array_is_a_pytree_with_a_static_tile():
    got = quantize(numbers((2, 5)), E4M3, (128,))
    leaves, tree = jax.tree.flatten(got)
    assert len(leaves) == 2
    back = jax.tree.unflatten(tree, leaves)
    assert isinstance(back, Quantized)
    assert back.tile == (128,)
