"""What the machine can do, measured in turns with the sides of a bench: matrix-product peak and memory bandwidth.

Both go through JAX, in a process of their own, so that their buffers are in nobody's memory figure. A round counts its best call,
since whatever disturbs can only slow a call down; a bench reports the median over its rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

# Rows and columns of the product: 17 GFLOP on CPU, enough to fill every core for a tenth of a second.
CPU_SIZE, ACCELERATOR_SIZE = 2048, 8192
# [rows, 1024] float32 read once, 256 MiB on CPU: beyond its caches.
CPU_ROWS, ACCELERATOR_ROWS, COLUMNS = 1 << 16, 1 << 20, 1024
CALLS = 4
PARTS = ("matmul", "bandwidth")


def load() -> None:
    """Starts the backend."""
    jax.devices()


class Machine:
    """Side whose parts return FLOP/s of a square product and bytes/s of reading an array in a matrix-vector product.

    The product is float32 on CPU, whatever the bench computes in, and `options["dtype"]` elsewhere.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        cpu = jax.default_backend() == "cpu"
        dtype = "float32" if cpu else str(options["dtype"])
        size = CPU_SIZE if cpu else ACCELERATOR_SIZE
        rows = CPU_ROWS if cpu else ACCELERATOR_ROWS
        self.facts: dict[str, Any] = {"peak_dtype": dtype, "peak_size": size, "bandwidth_bytes": 4 * rows * COLUMNS}
        self.parts: Sequence[str] = PARTS
        # One device: fake ones share the cores.
        square = jnp.ones((size, size), dtype)
        array, vector = jnp.ones((rows, COLUMNS), jnp.float32), jnp.ones((COLUMNS,), jnp.float32)
        product = jax.jit(jnp.matmul)
        self._work: dict[str, tuple[float, Callable[[], jax.Array]]] = {
            "matmul": (2.0 * size**3, lambda: product(square, square)),
            # As decoding reads weights; of the reductions XLA:CPU has, this one comes nearest to what the memory gives.
            "bandwidth": (float(array.nbytes), lambda: product(array, vector)),
        }

    def run(self, part: str) -> float:
        """FLOP/s or bytes/s of the best of a few calls."""
        amount, call = self._work[part]
        best = float("inf")
        for _ in range(CALLS):
            start = time.perf_counter()
            call().block_until_ready()
            best = min(best, time.perf_counter() - start)
        return amount / best
