"""Rotary position embeddings. B batch, T tokens, h heads, d head width, P = d / 2 rotated pairs.

The decoder turns interleaved pairs (2j, 2j+1), the vision tower half-split pairs (j, j + P); mixing them up gives fluent,
degraded text. Angles are float32 throughout: a bfloat16 position collapses neighbours from 256 on.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def inverse_frequencies(head_dim: int, theta: float) -> np.ndarray:
    """f_j = theta^(-2j/d), [P] float32, with the float32 arithmetic of the reference implementation."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return (np.float32(1.0) / np.power(np.float32(theta), exponent)).astype(np.float32)


def rope_tables(position_ids: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the angles `position * f_j`.

    Args:
      position_ids: [B, T] integers.
      head_dim: d.
      theta: base of the frequencies.

    Returns:
      (cos, sin), each [B, T, P] float32.
    """
    angles = position_ids.astype(jnp.float32)[..., None] * inverse_frequencies(head_dim, theta)
    return jnp.cos(angles), jnp.sin(angles)


def multimodal_rope_tables(
    position_ids: jax.Array, head_dim: int, theta: float, section: tuple[int, int, int]
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines for positions in time, height and width: each frequency turns by one of the three.

    The highest frequencies alternate between height and width, the lowest follow time. Where the three positions are equal the
    result is bit for bit that of `rope_tables`.

    Args:
      position_ids: [B, T, 3] integers: time, height, width.
      head_dim: d.
      theta: base of the frequencies.
      section: numbers of frequencies of height, width and time; the first two are equal, the sum is P.

    Returns:
      (cos, sin), each [B, T, P] float32.
    """
    height, width, time = section
    axis = np.array([1, 2] * height + [0] * time)
    assert height == width and len(axis) == head_dim // 2, (section, head_dim)
    angles = position_ids.astype(jnp.float32)[..., axis] * inverse_frequencies(head_dim, theta)
    return jnp.cos(angles), jnp.sin(angles)


def rotate_interleaved(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn the pairs (2j, 2j+1): the text decoder's convention.

    Args:
      x: [B, T, h, d].
      cos, sin: [B, T, P] float32.

    Returns:
      [B, T, h, d] in x's format; the rotation itself is float32.
    """
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    turned = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


def rotate_half_split(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn the pairs (j, j + P): the vision tower's convention.

    Args:
      x: [N, h, d] or [B, T, h, d].
      cos, sin: [N, P] or [B, T, P] float32.

    Returns:
      x's shape and format; the rotation itself is float32.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
