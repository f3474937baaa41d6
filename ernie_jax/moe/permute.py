"""Sorting rows by expert and back, with gathers in both directions. n tokens, K slots a token, A = n K assignments, D model.

Of the A sorted places only the first R may be kept, where it is known that no more go anywhere: an assignment whose place is
beyond them has a row of zeros.

The transpose of a gather is a scatter-add, slow on every backend and racy on some; since both directions of each index are
at hand here, the backward of a gather is the gather with the inverse.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np


def sort_by_expert(expert_index: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Order assignments by expert, stable in token order.

    Args:
      expert_index: [A] int32; `num_experts` marks an assignment that goes nowhere and sorts behind all others.
      num_experts: E.

    Returns:
      (order [A]: assignment at each sorted place; inverse [A]: sorted place of each assignment; group_sizes [E] int32).
    """
    count = expert_index.shape[0]
    iota = jnp.arange(count, dtype=jnp.int32)
    _, order = jax.lax.sort((expert_index, iota), num_keys=1, is_stable=True)
    inverse = jnp.zeros((count,), jnp.int32).at[order].set(iota, unique_indices=True)
    # Group ends by binary search in the sorted keys, instead of a histogram over a one-hot matrix.
    ends = jnp.searchsorted(expert_index[order], jnp.arange(num_experts, dtype=expert_index.dtype), side="right")
    return order, inverse, jnp.diff(ends, prepend=0).astype(jnp.int32)


@jax.custom_vjp
def expand(x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """Rows of sorted assignments: x [n, D], order [R], inverse [A] -> [R, D] with row i = x[order[i] // K], K = A / n."""
    return jnp.take(x, order // (inverse.size // x.shape[0]), axis=0, unique_indices=False, mode="clip")


def _expand_fwd(x: jax.Array, order: jax.Array, inverse: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array, int]]:
    return expand(x, order, inverse), (order, inverse, x.shape[0])


def _expand_bwd(residuals: tuple[jax.Array, jax.Array, int], ct: jax.Array) -> tuple[jax.Array, np.ndarray, np.ndarray]:
    order, inverse, n = residuals
    return collect(ct, order, inverse.reshape(n, -1)), no_gradient(order), no_gradient(inverse)


@jax.custom_vjp
def collect(rows: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """Sum of each token's rows, the transpose of `expand`: rows [R, D], inverse [n, K] -> [n, D]."""
    # One gather a slot, added as they are read: gathering [n, K, D] first would write and read it once more.
    parts = [_taken(rows, inverse[:, k], inverse.size).astype(jnp.float32) for k in range(inverse.shape[1])]
    return functools.reduce(jnp.add, parts).astype(rows.dtype)


def _collect_fwd(rows: jax.Array, order: jax.Array, inverse: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return collect(rows, order, inverse), (order, inverse)


def _collect_bwd(residuals: tuple[jax.Array, jax.Array], ct: jax.Array) -> tuple[jax.Array, np.ndarray, np.ndarray]:
    order, inverse = residuals
    return expand(ct, order, inverse), no_gradient(order), no_gradient(inverse)


@jax.custom_vjp
def permute(rows: jax.Array, index: jax.Array, inverse: jax.Array) -> jax.Array:
    """rows -> rows[index], where `index` is a permutation and `inverse` its inverse; of the sorted side the first R may be all."""
    return _taken(rows, index, index.size, unique_indices=True)


def _permute_fwd(rows: jax.Array, index: jax.Array, inverse: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return permute(rows, index, inverse), (index, inverse)


def _permute_bwd(residuals: tuple[jax.Array, jax.Array], ct: jax.Array) -> tuple[jax.Array, np.ndarray, np.ndarray]:
    order, inverse = residuals
    return _taken(ct, inverse, inverse.size, unique_indices=True), no_gradient(order), no_gradient(inverse)


def _taken(rows: jax.Array, index: jax.Array, places: int, *, unique_indices: bool = False) -> jax.Array:
    """rows[index] of `places` sorted places, zero where a place is beyond the rows."""
    beyond = rows.shape[0] < places
    return jnp.take(
        rows, index, axis=0, unique_indices=unique_indices, mode="fill" if beyond else "clip", fill_value=0 if beyond else None
    )


def no_gradient(index: jax.Array) -> np.ndarray:
    """The cotangent of an integer array, as a custom backward pass must return it."""
    return np.zeros(index.shape, jax.dtypes.float0)


expand.defvjp(_expand_fwd, _expand_bwd)
collect.defvjp(_collect_fwd, _collect_bwd)
permute.defvjp(_permute_fwd, _permute_bwd)
