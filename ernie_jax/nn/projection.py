"""The product of activations with a weight, with its backward pass spelled out. B batch, T tokens."""

from __future__ import annotations

import functools

import jax

from ernie_jax.nn.precision import matmul_precision

Array = jax.Array


def project(x: Array, kernel: Array) -> Array:
    """x [B, T, in...] times kernel [in..., out...] -> [B, T, out...].

    The gradient of the kernel is written as tokens contracted with tokens, in the kernel's own order of axes: the transpose rule
    of a dot product makes it the other way round, and on CPU the larger factor is turned before it and the result after.
    """
    return _product(matmul_precision(), x, kernel)


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
