"""Rows that travel in a format of their own, with their experts and weights in the same buffer: one collective carries all.

n tokens, D model, P peers, M slots a row, E experts a peer, S' rows that arrive, W words of a row.

A row of the buffer is the row's words, then the set of its experts as E bits, then M weights in the order of the experts. A row
of zero words has no expert and reads as zeros, so places that nobody fills need no other mark.

Forward and backward are straight-through: rows that went through a format have the gradient of rows that did not, and the
gradients go the same ways, in a format of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ernie_jax.moe.permute import no_gradient
from ernie_jax.parallel.quantized_rows import RowFormat, from_words, row_format, to_words


@dataclass(frozen=True)
class ExchangeFormats:
    """Names of the formats of an exchange (see `row_format`).

    Attributes:
      rows: of the rows on their way to the experts.
      results: of what comes back.
      gradients: of both on their way back through the backward pass.
    """

    rows: str = "compute"
    results: str = "compute"
    gradients: str = "compute"


def exchange_formats(rows: str | None, gradients: str | None) -> ExchangeFormats | None:
    """The formats of an exchange whose rows travel as `rows`; None for an exchange that leaves all as it is.

    Results are sums of experts and return in the compute format, as in ERNIE's recipe (FP8 there, bfloat16 back); with
    `bfloat16` everything does. Gradients stay in the compute format unless another is named.
    """
    rows = "compute" if rows is None else rows
    everything = "bfloat16" if rows == "bfloat16" else "compute"
    formats = ExchangeFormats(rows, everything, everything if gradients is None else gradients)
    return None if formats == ExchangeFormats() else formats


class Mover(Protocol):
    """What moves rows of words; `route` is a pytree of integers that both ways share."""

    def spread(self, words: jax.Array, lists: jax.Array | None, route: Any) -> jax.Array:
        """The words of tokens [n, W] and of their lists [n, P or 1, L] -> rows [S', W + L] of the experts' devices."""
        ...

    def gather(self, words: jax.Array, route: Any) -> jax.Array:
        """The transpose: [S', W] -> [n, P, W], zero words where a token did not go to a peer."""
        ...


def send_rows(
    mover: Mover, formats: ExchangeFormats, x: jax.Array, index: jax.Array, weights: jax.Array, route: Any, experts: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens to their experts.

    Args:
      mover: of words.
      formats: of rows and gradients.
      x: [n, D].
      index: [n, P, M] int32, experts of a peer, distinct, E for none; or [n, 1, M] where every peer gets the same list.
      weights: [n, P, M] or [n, 1, M].
      route: for the mover.
      experts: E.

    Returns:
      (rows [S', D], index [S', M], weights [S', M]), experts in ascending order.
    """
    columns, slots, dtype = x.shape[-1], index.shape[-1], x.dtype
    forward, backward = row_format(formats.rows, dtype), row_format(formats.gradients, dtype)
    index, weights = ascending(index, weights, experts)

    def forth(x: jax.Array, weights: jax.Array, index: jax.Array, route: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        lists = jnp.concatenate([write_experts(index, experts, forward), _write_weights(weights, forward)], -1)
        # What is kept for the backward pass, where it is, are the words, not the rows they are read as.
        words = checkpoint_name(mover.spread(forward.write(x), lists, route), "expert_received")
        width, bits = forward.width(columns), _mask_words(experts, forward)
        return (
            forward.read(words[:, :width], columns, dtype),
            _read_weights(words[:, width + bits :], forward, weights.dtype),
            read_experts(words[:, width : width + bits], experts, slots),
        )

    def send_fwd(x: jax.Array, weights: jax.Array, index: jax.Array, route: Any) -> tuple[Any, Any]:
        # Not through `send`: inside a nested call, what is named to be kept would not be seen.
        return forth(x, weights, index, route), route

    def send_bwd(route: Any, cotangents: Any) -> tuple[Any, ...]:
        rows, of_weights, _ = cotangents
        words = jnp.concatenate([backward.write(rows), _write_weights(of_weights, backward)], -1)
        returned = mover.gather(words, route)
        width = backward.width(columns)
        parts = _read_weights(returned[..., width:], backward, weights.dtype)
        of_weights = parts if index.shape[1] == parts.shape[1] else parts.sum(1, keepdims=True)
        return (
            _sum_over_peers(returned[..., :width], backward, columns, dtype),
            of_weights,
            no_gradient(index),
            _no_gradients(route),
        )

    send = jax.custom_vjp(forth)
    send.defvjp(send_fwd, send_bwd)
    rows, arrived, chosen = send(x, weights, index, route)
    return rows, chosen, arrived


def return_rows(mover: Mover, formats: ExchangeFormats, rows: jax.Array, route: Any) -> jax.Array:
    """Results back to their tokens: rows [S', D] -> [n, D], the sum over peers in float32."""
    columns, dtype = rows.shape[-1], rows.dtype
    forward, backward = row_format(formats.results, dtype), row_format(formats.gradients, dtype)

    def forth(rows: jax.Array, route: Any) -> jax.Array:
        return _sum_over_peers(mover.gather(forward.write(rows), route), forward, columns, dtype)

    def back_fwd(rows: jax.Array, route: Any) -> tuple[jax.Array, Any]:
        return forth(rows, route), route

    def back_bwd(route: Any, cotangent: jax.Array) -> tuple[Any, ...]:
        words = mover.spread(backward.write(cotangent), None, route)
        return backward.read(words, columns, dtype), _no_gradients(route)

    back = jax.custom_vjp(forth)
    back.defvjp(back_fwd, back_bwd)
    return back(rows, route)


def packed_width(columns: int, slots: int, experts: int, row: RowFormat) -> int:
    """Words of a row of D columns with its set of experts and M weights."""
    return row.width(columns) + _mask_words(experts, row) + slots * row.weights.itemsize // row.word.itemsize


def _sum_over_peers(words: jax.Array, row: RowFormat, columns: int, dtype: jnp.dtype) -> jax.Array:
    return row.read(words, columns, jnp.dtype("float32")).sum(1).astype(dtype)


def _no_gradients(route: Any) -> Any:
    return jax.tree.map(no_gradient, route)


def ascending(index: jax.Array, weights: jax.Array, experts: int) -> tuple[jax.Array, jax.Array]:
    """The slots of each row in the order of their experts, those of no expert last and of weight 0.

    By a sum over ranks: M is small, and a sort would have a scatter for its gradient.
    """
    # For [..., M, M], the slot that goes to a place and the place.
    rank = jnp.sum(index[..., None, :] < index[..., :, None], -1)
    moves = (rank[..., None] == jnp.arange(index.shape[-1])) & (index < experts)[..., None]
    sorted_index = jnp.sum(jnp.where(moves, (index - experts)[..., None], 0), -2) + experts
    return sorted_index, jnp.sum(jnp.where(moves, weights[..., None], 0), -2).astype(weights.dtype)


def _mask_words(experts: int, row: RowFormat) -> int:
    return math.ceil(experts / (8 * row.word.itemsize))


def write_experts(index: jax.Array, experts: int, row: RowFormat) -> jax.Array:
    """[..., M] -> [..., ceil(E / bits)]: bit b of word w says whether expert w bits + b is there."""
    bits = 8 * row.word.itemsize
    words = _mask_words(experts, row)
    there = jnp.any(index[..., None] == jnp.arange(words * bits, dtype=index.dtype), -2) & (jnp.arange(words * bits) < experts)
    powers = jnp.left_shift(jnp.ones(bits, row.word), jnp.arange(bits, dtype=row.word))
    return jnp.sum(jnp.where(there.reshape(*index.shape[:-1], words, bits), powers, 0), -1, dtype=row.word)


def read_experts(words: jax.Array, experts: int, slots: int) -> jax.Array:
    """The experts of each row in ascending order: [S', M] int32, E where there are fewer."""
    bits = 8 * words.dtype.itemsize
    there = jnp.right_shift(words[..., None], jnp.arange(bits, dtype=words.dtype)) & 1
    running = jnp.cumsum(there.reshape(*words.shape[:-1], -1)[..., :experts].astype(jnp.int32), -1)
    # Before expert number j + 1 of a row come as many experts as have j or fewer of its own up to themselves.
    return jnp.stack([jnp.sum(running <= j, -1) for j in range(slots)], -1).astype(jnp.int32)


def _write_weights(weights: jax.Array, row: RowFormat) -> jax.Array:
    return to_words(weights.astype(row.weights), row.word)


def _read_weights(words: jax.Array, row: RowFormat, dtype: jnp.dtype) -> jax.Array:
    return from_words(words, row.weights).astype(dtype)
