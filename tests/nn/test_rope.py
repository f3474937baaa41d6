"""Cases 18 and 19: which pairs turn, and by exact angles."""

import jax.numpy as jnp
import numpy as np

from ernie_jax.nn.rope import (
    inverse_frequencies,
    multimodal_rope_tables,
    rope_tables,
    rotate_half_split,
    rotate_interleaved,
)

X = jnp.asarray([1.0, 0, 0, 0]).reshape(1, 1, 1, 4)
ONE = jnp.asarray([[1]])
COS, SIN = np.cos(1.0), np.sin(1.0)


def test_text_turns_interleaved_pairs():
    turned = rotate_interleaved(X, *rope_tables(ONE, 4, 500000.0))
    np.testing.assert_allclose(turned.reshape(-1), [COS, SIN, 0, 0], atol=1e-6)


def test_vision_turns_half_split_pairs():
    turned = rotate_half_split(X, *rope_tables(ONE, 4, 10000.0))
    np.testing.assert_allclose(turned.reshape(-1), [COS, 0, SIN, 0], atol=1e-6)


def test_a_rotation_keeps_lengths_and_depends_on_distance_only():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 2, 1, 8)), jnp.float32) for _ in range(2))

    def products(start):
        tables = rope_tables(jnp.asarray([[start, start + 5]]), 8, 10000.0)
        return jnp.einsum("bthd,bshd->ts", rotate_interleaved(q, *tables), rotate_interleaved(k, *tables))

    np.testing.assert_allclose(products(0), products(1000), atol=1e-3)
    turned = rotate_interleaved(q, *rope_tables(jnp.asarray([[3, 9]]), 8, 10000.0))
    np.testing.assert_allclose(jnp.linalg.norm(turned, axis=-1), jnp.linalg.norm(q, axis=-1), rtol=1e-6)


def test_neighbouring_positions_differ_whatever_the_activation_format():
    cos, sin = rope_tables(jnp.arange(255, 262)[None], 128, 500000.0)
    assert cos.dtype == jnp.float32
    rows = np.concatenate([cos[0], sin[0]], -1)
    assert len(np.unique(rows, axis=0)) == 7
    turned = rotate_interleaved(jnp.ones((1, 7, 1, 128), jnp.bfloat16), cos, sin)
    assert turned.dtype == jnp.bfloat16


def test_angles_far_out():
    """Bound of the case: below 0.02 rad of the exact angle at the longest context; rounded frequencies are off by 234."""
    frequencies = inverse_frequencies(128, 500000.0)
    exact = 131071 * 500000.0 ** (-np.arange(0, 128, 2) / 128)
    assert np.abs(np.float32(131071) * frequencies - exact).max() < 2e-2
    cos, _ = rope_tables(jnp.asarray([[131071]]), 128, 500000.0)
    np.testing.assert_allclose(cos[0, 0], np.cos(np.float32(131071) * frequencies), atol=1e-3)


def test_each_frequency_of_a_3d_position_follows_one_axis():
    """Case 20, section [22, 22, 20]: 0 follows height, 1 width, 43 width, 44 to 63 time."""
    section, dim, theta = (22, 22, 20), 128, 500000.0
    axis_of = np.full(64, -1)
    for axis in range(3):
        position = np.zeros((1, 1, 3), np.int32)
        position[..., axis] = 1000
        sines = np.asarray(multimodal_rope_tables(jnp.asarray(position), dim, theta, section)[1])[0, 0]
        axis_of[sines != 0] = axis
    assert axis_of[:44].tolist() == [1, 2] * 22 and axis_of[44:].tolist() == [0] * 20


def test_equal_positions_in_all_axes_are_the_1d_rotation_bit_for_bit():
    positions = jnp.asarray(np.array([[0, 1, 255, 256, 257, 131071]], np.int32))
    three = jnp.broadcast_to(positions[..., None], (*positions.shape, 3))
    for mine, theirs in zip(multimodal_rope_tables(three, 128, 5e5, (22, 22, 20)), rope_tables(positions, 128, 5e5), strict=True):
        np.testing.assert_array_equal(mine, theirs)
