"""The Pallas backend: tiles, products that need several of them, and lowering for a GPU. R rows, E groups, D and F widths.

What it shares with the other backends is tested in test_grouped_matmul.py, interpreted on CPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from ernie_jax.moe.grouped_matmul import AUTO, grouped_matmul
from ernie_jax.moe.grouped_matmul.pallas import RowTiles, most_tiles


def step(backend, rows, weights, cotangent, sizes):
    out, pullback = jax.vjp(lambda r, w: grouped_matmul(r, w, sizes, backend=backend), rows, weights)
    return (out, *pullback(cotangent))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("bfloat16", 2e-2)])
def test_products_of_several_tiles_in_every_direction_equal_the_dense_backend(dtype, tolerance):
    # Widths over 128 that no tile divides; groups below, at and above the height of 128 rows, in any position.
    sizes, num_rows, inner, outer = [129, 0, 300, 1, 128], 600, 150, 200
    rng = np.random.default_rng(0)
    rows, weights, cotangent = (
        jnp.asarray(rng.standard_normal(s), dtype) for s in ((num_rows, inner), (len(sizes), inner, outer), (num_rows, outer))
    )
    rows, weights = rows / 4, weights / 4
    rows, cotangent = (a.at[sum(sizes) :].set(jnp.nan) for a in (rows, cotangent))
    run = jax.jit(step, static_argnums=0)
    got, want = (run(b, rows, weights, cotangent, jnp.array(sizes)) for b in ("pallas", "dense"))
    # The dense backend's own backward is undone by the NaN of spare cotangents.
    want = [want[0], *run("dense", rows, weights, jnp.nan_to_num(cotangent), jnp.array(sizes))[1:]]
    for name, a, b in zip(("out", "rows", "weights"), got, want, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max(), err_msg=name)
    assert not np.asarray(got[2], np.float32)[1].any()


@pytest.mark.parametrize("height", [16, 64])
@pytest.mark.parametrize(
    ("sizes", "num_rows"), [([0, 1, 64, 65, 0, 200], 400), ([0, 0, 0], 70), ([16] * 8, 128), ([127, 1, 1], 129), ([5], 5)]
)
def test_tiles_cover_every_row_once_and_work_follows_the_sizes(sizes, num_rows, height):
    tiles = RowTiles(*map(np.asarray, RowTiles.cut(jnp.array(sizes, jnp.int32), num_rows, height)))
    group = np.repeat(np.arange(len(sizes)), sizes)
    seen = np.zeros(num_rows, int)
    for owner, busy, first, end in zip(*tiles, strict=True):
        assert end - first <= height
        seen[first:end] += 1
        if busy:
            assert end > first
            assert (group[first:end] == owner).all()
        elif end > first:
            assert first >= sum(sizes)
    np.testing.assert_array_equal(seen, 1)
    assert tiles.busy.sum() == sum(-(-s // height) for s in sizes)
    assert tiles.group.min() >= 0 and tiles.group.max() < len(sizes)


def test_the_static_grid_has_room_for_the_worst_sizes_and_no_more():
    height, num_rows, num_groups = 16, 100, 5
    # Four groups of a full tile and one row, and the rest.
    worst = [17] * 4 + [num_rows - 4 * 17]
    assert sum(-(-s // height) for s in worst) <= most_tiles(num_rows, num_groups, height) <= num_rows // height + num_groups


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lowers_to_three_triton_kernels_for_a_gpu_that_is_not_there(dtype):
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    shapes = ((300, 150), (3, 150, 200), (300, 200))
    args = [jax.ShapeDtypeStruct(s, dtype) for s in shapes]
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(step, static_argnums=0).trace("pallas", *args, jax.ShapeDtypeStruct((3,), np.int32))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == 3
    # Nothing of the interpreter's loops is left, nor a dense product.
    assert "stablehlo.while" not in text and "stablehlo.dot" not in text
    # The same function, lowered for this machine, is interpreted.
    assert "triton" not in traced.lower(lowering_platforms=("cpu",)).as_text()


def test_it_is_the_default_on_gpu_only_and_refuses_what_it_cannot_run_on(monkeypatch):
    assert [platform for platform, name in AUTO.items() if name == "pallas"] == ["gpu"]
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(ValueError, match=r"'pallas' runs on gpu and cpu, this is 'tpu'.*'megablox', 'ragged_dot'"):
        grouped_matmul(jnp.ones((2, 3)), jnp.ones((1, 3, 4)), jnp.array([2]), backend="pallas")
