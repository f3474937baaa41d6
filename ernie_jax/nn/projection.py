"""The product of activations with a weight, with its backward pass spelled out. B batch, T tokens."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from ernie_jax.native import contracted_rows, missing, product
from ernie_jax.nn.precision import matmul_precision
from ernie_jax.sharding import current_layout

Array = jax.Array


def project(x: Array, kernel: Array) -> Array:
    """x [B, T, in...] times kernel [in..., out...] -> [B, T, out...].

    The gradient of the kernel is written as tokens contracted with tokens, in the kernel's own order of axes: the transpose rule
    of a dot product makes it the other way round, and on CPU the larger factor is turned before it and the result after.
    """
    if multiplies_natively(x.dtype, kernel.dtype):
        return _native_product(x, kernel)
    return _product(matmul_precision(), x, kernel)


def project_turned(x: Array, kernel: Array, precision: PrecisionLike = None) -> Array:
    """x [B, T, D] times the transpose of kernel [V, D] -> [B, T, V] in float32; `precision` as of `jnp.einsum`."""
    if multiplies_natively(x.dtype, kernel.dtype):
        return _native_turned(x, kernel)
    return jnp.einsum("btd,vd->btv", x, kernel, precision=precision, preferred_element_type=jnp.float32)


def multiplies_natively(*dtypes: DTypeLike) -> bool:
    """Whether products here go to the native kernels: float32 on one CPU device, where the kernels are to be had.

    On a mesh the compiler splits products and brings their parts together, which it can do of its own products alone.
    """
    layout = current_layout()
    alone = layout is None or layout.mesh.size == 1
    return alone and all(jnp.dtype(dtype) == jnp.float32 for dtype in dtypes) and missing() is None


@jax.custom_vjp
def _native_product(x: Array, kernel: Array) -> Array:
    outputs = kernel.shape[x.ndim - 2 :]
    rows, matrix = _matrices(x, kernel)
    return product(rows, matrix).reshape(*x.shape[:2], *outputs)


def _native_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return _native_product(x, kernel), (x, kernel)


def _native_backward(saved: tuple[Array, Array], ct: Array) -> tuple[Array, Array]:
    x, kernel = saved
    rows, matrix = _matrices(x, kernel)
    cts = ct.reshape(len(rows), -1)
    return product(cts, matrix, turned=True).reshape(x.shape), contracted_rows(rows, cts).reshape(kernel.shape)


@jax.custom_vjp
def _native_turned(x: Array, kernel: Array) -> Array:
    return product(x.reshape(-1, x.shape[-1]), kernel, turned=True).reshape(*x.shape[:2], -1)


def _turned_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return _native_turned(x, kernel), (x, kernel)


def _turned_backward(saved: tuple[Array, Array], ct: Array) -> tuple[Array, Array]:
    x, kernel = saved
    rows, cts = (a.reshape(-1, a.shape[-1]) for a in (x, ct))
    return product(cts, kernel).reshape(x.shape), contracted_rows(cts, rows)


_native_turned.defvjp(_turned_forward, _turned_backward)


def _matrices(x: Array, kernel: Array) -> tuple[Array, Array]:
    """x as [tokens, inputs] and the kernel as [inputs, outputs]."""
    rows = x.reshape(x.shape[0] * x.shape[1], -1)
    return rows, kernel.reshape(rows.shape[1], -1)


_native_product.defvjp(_native_forward, _native_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(precision: str | None, x: Array, kernel: Array) -> Array:
    inner = x.ndim - 2
    return jax.lax.dot_general(x, kernel, ((tuple(range(2, x.ndim)), tuple(range(inner))), ((), ())), precision=precision)


def _forward(precision: str | None, x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return _product(precision, x, kernel), (x, kernel)


def _backward(precision: str | None, saved: tuple[Array, Array], ct: Array) -> tuple[Array, Array]:
    x, kernel = saved
    inner = x.ndim - 2
    outputs, kernel_outputs = tuple(range(2, ct.ndim)), tuple(range(inner, kernel.ndim))
    d_x = jax.lax.dot_general(ct, kernel, ((outputs, kernel_outputs), ((), ())), precision=precision)
    # As plain matrices: of more axes XLA:CPU makes a transposed copy of x first.
    tokens = x.shape[0] * x.shape[1]
    factors = x.reshape(tokens, -1), ct.reshape(tokens, -1)
    d_kernel = jax.lax.dot_general(*factors, (((0,), (0,)), ((), ())), precision=precision)
    return d_x.astype(x.dtype), d_kernel.reshape(kernel.shape).astype(kernel.dtype)


_product.defvjp(_forward, _backward)
