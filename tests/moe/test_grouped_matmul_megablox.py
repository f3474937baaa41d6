"""The megablox backend: products that need several tiles, and lowering for a TPU. R rows, E groups, D and F widths.

What it shares with the other backends is tested in test_grouped_matmul.py, interpreted on CPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ernie_jax.moe.grouped_matmul import grouped_matmul
from ernie_jax.moe.grouped_matmul import megablox as module


def step(backend, rows, weights, cotangent, sizes):
    out, pullback = jax.vjp(lambda r, w: grouped_matmul(r, w, sizes, backend=backend), rows, weights)
    return (out, *pullback(cotangent))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("bfloat16", 2e-2)])
def test_products_of_several_tiles_in_every_direction_equal_the_dense_backend(dtype, tolerance):
    # 700 rows in tiles of 256, with borders of groups within, at and across those of tiles; widths that no tile divides.
    sizes, num_rows, inner, outer = [130, 0, 126, 1, 300, 83], 700, 150, 200
    rng = np.random.default_rng(0)
    rows, weights, cotangent = (
        jnp.asarray(rng.standard_normal(s), dtype) for s in ((num_rows, inner), (len(sizes), inner, outer), (num_rows, outer))
    )
    rows, weights = rows / 4, weights / 4
    rows, cotangent = (a.at[sum(sizes) :].set(jnp.nan) for a in (rows, cotangent))
    run = jax.jit(step, static_argnums=0)
    got, want = (run(b, rows, weights, cotangent, jnp.array(sizes)) for b in ("megablox", "dense"))
    # The dense backend's own backward is undone by the NaN of spare cotangents.
    want = [want[0], *run("dense", rows, weights, jnp.nan_to_num(cotangent), jnp.array(sizes))[1:]]
    for name, a, b in zip(("out", "rows", "weights"), got, want, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max(), err_msg=name)
    assert not np.asarray(got[2], np.float32)[1].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lowers_to_mosaic_kernels_for_a_tpu_that_is_not_there(dtype):
    args = [jax.ShapeDtypeStruct(s, dtype) for s in ((600, 256), (3, 256, 384), (600, 384))]
    traced = jax.jit(step, static_argnums=0).trace("megablox", *args, jax.ShapeDtypeStruct((3,), np.int32))
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    # Forward, gradient of the rows, gradient of the weights, and a second forward that compiling drops.
    assert text.count("@tpu_custom_call") in (3, 4)
    assert "stablehlo.dot" not in text
    # The same function, lowered for this machine, is interpreted.
    assert "tpu_custom_call" not in traced.lower(lowering_platforms=("cpu",)).as_text()


@pytest.mark.parametrize(("size", "side"), [(1, 128), (128, 128), (150, 256), (512, 512), (640, 128), (1536, 512), (2560, 512)])
def test_tiles_are_as_large_as_costs_no_padding(size, side):
    assert module._side(size) == side


def test_it_refuses_what_it_cannot_run_on(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(ValueError, match=r"'megablox' runs on tpu and cpu, this is 'gpu'.*'pallas', 'ragged_dot'"):
        grouped_matmul(jnp.ones((2, 3)), jnp.ones((1, 3, 4)), jnp.array([2]), backend="megablox")
