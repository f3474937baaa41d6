"""Attention in both directions within segments, as the vision tower has it: every kernel, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ernie_jax.nn.attention_kernels import AttentionMask, attend

SEGMENTS = np.array([[1] * 5 + [2] * 12 + [3] * 2 + [0] * 4, [1] * 16 + [2] * 7, [0] * 23])


def operands():
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(3, 23, 2, 8)), jnp.float32) for _ in range(4)]


def test_a_query_sees_its_whole_segment_and_nothing_else():
    seen = np.asarray(AttentionMask.bidirectional(jnp.asarray(SEGMENTS)).allowed())
    expected = (SEGMENTS[:, :, None] == SEGMENTS[:, None]) & (SEGMENTS[:, :, None] > 0)
    np.testing.assert_array_equal(seen, expected)


@pytest.mark.parametrize("chunk", [4, 8, 23])
def test_chunked_equals_a_softmax_written_out(chunk):
    q, k, v, ct = operands()
    mask = AttentionMask.bidirectional(jnp.asarray(SEGMENTS))

    def plain(q, k, v):
        scores = jnp.einsum("bthd,bshd->bhts", q, k) * 8**-0.5
        seen = (SEGMENTS[:, :, None] == SEGMENTS[:, None]) & (SEGMENTS[:, :, None] > 0)
        weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30), -1)
        return jnp.einsum("bhts,bshd->bthd", jnp.where(seen[:, None], weights, 0.0), v)

    out, pullback = jax.vjp(lambda *a: attend(*a, mask, implementation="chunked", chunk=chunk), q, k, v)
    expected, expected_pullback = jax.vjp(plain, q, k, v)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    valid = jnp.asarray(SEGMENTS > 0)[:, :, None, None]
    for mine, theirs in zip(pullback(ct * valid), expected_pullback(ct * valid), strict=True):
        np.testing.assert_allclose(mine, jnp.nan_to_num(theirs), rtol=1e-4, atol=1e-5)
