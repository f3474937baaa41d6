"""The product of sorted rows with their group's weights: backends by name, and the choice among them.

R rows, E groups (experts), D contracted width, F output width.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ernie_jax.moe.grouped_matmul.blocks import block_product
from ernie_jax.moe.grouped_matmul.dense import dense_product
from ernie_jax.moe.grouped_matmul.megablox import megablox_product
from ernie_jax.moe.grouped_matmul.native import native_product
from ernie_jax.moe.grouped_matmul.pallas import pallas_product
from ernie_jax.moe.grouped_matmul.ragged import ragged_product
from ernie_jax.native import missing

_log = logging.getLogger(__name__)

Backend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

BACKENDS: dict[str, Backend] = {
    "native": native_product,
    "blocks": block_product,
    "ragged_dot": ragged_product,
    "pallas": pallas_product,
    "megablox": megablox_product,
    "dense": dense_product,
}

# Kernels for one kind of accelerator; on CPU they are interpreted. The others run anywhere.
ONLY_ON: dict[str, tuple[str, ...]] = {"native": ("cpu",), "pallas": ("gpu", "cpu"), "megablox": ("tpu", "cpu")}

# By what the compilers make of them: of `ragged_dot` XLA makes a grouped kernel on TPU v5p only, and on v5e, v6e, GPU and CPU a
# masked dense product, E times the FLOPs. On GPU the loops of `blocks` would wait for the host in every round. On CPU `native`
# is up to twice as fast, in the one format that it has, where there is a compiler for it.
AUTO: dict[str, str] = {"cpu": "blocks", "gpu": "pallas", "tpu": "megablox"}


def grouped_matmul(
    rows: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    *,
    backend: str = "auto",
    stack: tuple[jax.Array, jax.Array] | None = None,
    first_row: jax.Array | None = None,
    sets: int = 1,
) -> jax.Array:
    """Each row times the weights of its group, accumulated in float32.

    Rows past the last group, and rows before `first_row`, are spare: whatever they hold (NaN too) their outputs and their input
    gradient are zero, and nothing of them reaches the weight gradient. A group without rows has a weight gradient of zero.

    Args:
      rows: [R, D], sorted by group: group e owns the rows from first_row + sum(group_sizes[:e]) to first_row +
        sum(group_sizes[:e + 1]).
      weights: [E, D, F], of the same dtype.
      group_sizes: [E] integers, their sum at most R - first_row.
      stack: (all layers' weights [L, E, D, F], this layer): the values of `weights` where they are kept, in any dtype, outside
        differentiation. `blocks` and `native` read single experts there, so that a layer's weights are never copied as a whole;
        the other backends take no notice.
      backend: a name of `BACKENDS`, or `auto` for the one that suits `jax.default_backend()` and the format of the rows.
      first_row: scalar, where group 0 begins, None for 0: rows of groups of another width stand before it.
      sets: how many sets of groups share the rows, of which these are one: R / (sets E) rows a group are to be expected.

    Returns:
      [R, F] in the dtype of `rows`.

    Raises:
      ValueError: an unknown backend, or one that this platform cannot run; shapes or dtypes that do not fit.
    """
    _check(rows, weights, group_sizes)
    product, sizes = BACKENDS[resolve_backend(backend, rows.dtype)], group_sizes.astype(jnp.int32)
    if product is block_product:
        return block_product(rows, weights, sizes, stack, first_row, sets)
    if product is native_product:
        return native_product(rows, weights, sizes, stack, first_row)
    if first_row is None:
        return product(rows, weights, sizes)
    # These know groups from row 0 on: the rows before the first become spare rows behind the last.
    return jnp.roll(product(jnp.roll(rows, -first_row, axis=0), weights, sizes), first_row, axis=0)


def backends_on(platform: str) -> list[str]:
    """The names of `BACKENDS` that run on `cpu`, `gpu` or `tpu`, sorted."""
    return sorted(name for name in BACKENDS if platform in ONLY_ON.get(name, (platform,)))


def resolve_backend(name: str, dtype: DTypeLike = jnp.float32) -> str:
    """The backend that `name` stands for here: `auto` is the one that suits the platform and rows of this format.

    Raises:
      ValueError: an unknown name, or a backend that this platform cannot run.
    """
    platform = jax.default_backend()
    if name == "auto":
        float32 = platform == "cpu" and jnp.dtype(dtype) == jnp.float32
        name = _choose(platform, missing() if float32 else "it multiplies float32 on CPUs")
    if name not in BACKENDS:
        raise ValueError(f"unknown grouped_matmul backend {name!r}; expected 'auto' or one of {sorted(BACKENDS)}")
    if name not in backends_on(platform):
        raise ValueError(
            f"grouped_matmul backend {name!r} runs on {' and '.join(ONLY_ON[name])}, this is {platform!r}; "
            f"use 'auto' or one of {backends_on(platform)}"
        )
    return name


@functools.cache
def _choose(platform: str, not_native: str | None) -> str:
    if platform not in AUTO:
        raise ValueError(
            f"grouped_matmul has no default backend for platform {platform!r} (known: {sorted(AUTO)}); "
            f"name one of {sorted(BACKENDS)}"
        )
    chosen = "native" if not_native is None else AUTO[platform]
    why = f" (not native: {not_native})" if platform == "cpu" and not_native is not None else ""
    _log.info("grouped_matmul backend on %s: %s%s", platform, chosen, why)
    return chosen


def _check(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> None:
    fits = rows.ndim == 2 and weights.ndim == 3 and rows.shape[1] == weights.shape[1] and group_sizes.shape == weights.shape[:1]
    if not fits:
        raise ValueError(
            f"grouped_matmul expects rows [R, D], weights [E, D, F], group_sizes [E]; "
            f"got {rows.shape}, {weights.shape}, {group_sizes.shape}"
        )
    if rows.dtype != weights.dtype:
        raise ValueError(f"rows are {rows.dtype} and weights are {weights.dtype}; cast one to the other's dtype")
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(f"group_sizes must be integers, got {group_sizes.dtype}")


__all__ = ["AUTO", "BACKENDS", "backends_on", "grouped_matmul", "resolve_backend"]
