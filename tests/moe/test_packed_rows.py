"""Rows with their experts and weights in one buffer: sets as bits, weights in order, and how many bytes a row takes."""

import jax.numpy as jnp
import numpy as np
import pytest

from ernie_jax.moe.dispatch.packed_rows import ascending, exchange_formats, packed_width, read_experts, write_experts
from ernie_jax.parallel.quantized_rows import ROW_FORMATS

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("experts", [1, 4, 8, 9, 33, 40])
def test_sets_of_experts_as_bits(name, experts):
    slots = min(5, experts)
    index = np.stack([np.sort(RNG.permutation(experts + 3)[:slots]) for _ in range(50)])
    index = np.sort(np.where(index < experts, index, experts)).astype(np.int32)
    words = write_experts(jnp.asarray(index), experts, ROW_FORMATS[name])
    np.testing.assert_array_equal(read_experts(words, experts, slots), index)


def test_weights_follow_their_experts_into_order():
    index = jnp.asarray([[4, 1, 9], [9, 3, 0], [9, 9, 9]])
    weights = jnp.asarray([[0.4, 0.1, 7.0], [7.0, 0.3, 0.25], [7.0, 7.0, 7.0]])
    ordered, moved = ascending(index, weights, 9)
    assert ordered.tolist() == [[1, 4, 9], [0, 3, 9], [9, 9, 9]]
    np.testing.assert_allclose(moved, [[0.1, 0.4, 0.0], [0.25, 0.3, 0.0], [0.0, 0.0, 0.0]])


def test_fp8_dispatch_is_at_most_53_hundredths_of_bfloat16s_from_128_columns_on():
    """With the sets of experts and the weights: 128 + 4 + 1 + 3 x 2 bytes against 2 x 128 + 2 + 3 x 2, and so on."""
    for columns, slots, experts in ((128, 1, 1), (128, 2, 2), (128, 3, 4), (256, 6, 8), (2560, 6, 16), (8192, 8, 128)):
        narrow, wide = (packed_width(columns, slots, experts, ROW_FORMATS[name]) for name in ("fp8", "bfloat16"))
        assert narrow / (2 * wide) <= 0.53, (columns, slots)
    assert packed_width(128, 3, 4, ROW_FORMATS["fp8"]) == 128 + 4 + 1 + 6
    assert packed_width(128, 3, 4, ROW_FORMATS["bfloat16"]) == 128 + 1 + 3
    assert packed_width(300, 2, 9, ROW_FORMATS["fp8"]) == 300 + 12 + 2 + 4


def test_formats_of_an_exchange():
    assert exchange_formats(None, None) is None and exchange_formats("compute", None) is None
    formats = exchange_formats("fp8", None)
    assert (formats.rows, formats.results, formats.gradients) == ("fp8", "compute", "compute")
    formats = exchange_formats("bfloat16", None)
    assert (formats.rows, formats.results, formats.gradients) == ("bfloat16", "bfloat16", "bfloat16")
    assert exchange_formats(None, "int8").gradients == "int8"
