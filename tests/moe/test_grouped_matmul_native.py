"""The native products at sizes that fill no chunk, no panel and no part of the contracted width, and take several of each."""

import jax.numpy as jnp
import numpy as np
import pytest

from ernie_jax.native import contracted_rows, grouped_rows, grouped_weights, product


def matrices(rng, *shapes):
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def close(got, wanted, depth):
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=2e-6 * depth)


@pytest.mark.parametrize(
    ("sizes", "first", "depth", "width"),
    [
        ([700], 0, 530, 70),
        ([3, 0, 320, 650, 15], 5, 1100, 45),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], 0, 515, 37),
        ([40, 1300], 2, 256, 300),
        ([312, 616], 0, 257, 1),
    ],
)
def test_grouped_products_equal_a_loop_over_groups(sizes, first, depth, width):
    rng = np.random.default_rng(0)
    count = first + sum(sizes) + 3
    rows, weights, cts = matrices(rng, (count, depth), (2, len(sizes), depth, width), (count, width))
    layer, own, begin = jnp.int32(1), jnp.asarray(sizes, jnp.int32), jnp.int32(first)
    out, d_rows = np.zeros((count, width)), np.zeros((count, depth))
    d_weights = np.zeros((len(sizes), depth, width))
    at = first
    for e, size in enumerate(sizes):
        here = slice(at, at + size)
        out[here] = rows[here].astype(np.float64) @ weights[1, e]
        d_rows[here] = cts[here].astype(np.float64) @ weights[1, e].T
        d_weights[e] = rows[here].T.astype(np.float64) @ cts[here]
        at += size
    close(grouped_rows(rows, jnp.asarray(weights), layer, own, begin), out, depth)
    close(grouped_rows(jnp.asarray(cts), jnp.asarray(weights), layer, own, begin, turned=True), d_rows, width)
    close(grouped_weights(rows, jnp.asarray(cts), own, begin), d_weights, max(sizes))


@pytest.mark.parametrize(("rows", "depth", "width"), [(700, 530, 70), (1, 1030, 33), (6, 515, 3), (309, 40, 2100)])
def test_plain_products_equal_numpy(rows, depth, width):
    rng = np.random.default_rng(1)
    x, y, cts = matrices(rng, (rows, depth), (depth, width), (rows, width))
    wide = [a.astype(np.float64) for a in (x, y, cts)]
    close(product(jnp.asarray(x), jnp.asarray(y)), wide[0] @ wide[1], depth)
    close(product(jnp.asarray(cts), jnp.asarray(y), turned=True), wide[2] @ wide[1].T, width)
    close(contracted_rows(jnp.asarray(x), jnp.asarray(cts)), wide[0].T @ wide[2], rows)
