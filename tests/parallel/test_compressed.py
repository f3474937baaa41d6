"""Compressed sums over devices: nothing is lost over steps, bytes on the wire, and descent that ends where the plain one does."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ernie_jax.parallel import compressed_sum, make_compression, nothing_held
from ernie_jax.parallel.largest_elements import LargestElements, among_largest
from ernie_jax.sharding import make_mesh
from ernie_jax.testing import collectives

G = 4
NAMES = ("int8", "fp8", "sparse")


def mesh():
    return make_mesh(data=G, devices=jax.devices()[:G])


def summed(compression, arrays, held):
    """Arrays [G, ...], one a device, by name -> (sums, held back [G, ...])."""

    def body(arrays, held):
        arrays, held = jax.tree.map(lambda a: a[0], (arrays, held))
        sums, held = compressed_sum(compression, arrays, held, "data")
        return sums, jax.tree.map(lambda a: a[None], held)

    spec = P("data")
    call = jax.shard_map(body, mesh=mesh(), in_specs=(spec, spec), out_specs=(P(), spec), check_vma=False)
    return jax.jit(call)(arrays, held)


def summed_one(compression, array, held=None):
    """The same for a single array."""
    held = none_held(compression, {"": array})[""] if held is None else held
    sums, held = summed(compression, {"": array}, {"": held})
    return sums[""], held[""]


def none_held(compression, arrays, least=0):
    held = nothing_held(compression, {name: a[0].size for name, a in arrays.items()}, G, least)
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (G, *a.shape)), held)


def total_held(held, shape):
    """What all devices together hold back of one array."""
    own = np.asarray(held.of_array, np.float64).sum(0)
    own += np.asarray(held.of_sum, np.float64).reshape(-1)[: own.size]
    return own.reshape(shape)


@pytest.mark.parametrize("name", NAMES)
def test_what_went_in_came_out_or_is_still_held(name):
    """For a matrix of odd size, a vector smaller than a run, and a scalar's worth of one element."""
    compression = make_compression(name, 0.05)
    rng = np.random.default_rng(0)
    shapes = {"matrix": (37, 29), "vector": (5,), "one": (1,)}
    call = jax.jit(functools.partial(summed, compression))
    held, went_in, came_out = None, dict.fromkeys(shapes, 0.0), dict.fromkeys(shapes, 0.0)
    for step in range(6):
        arrays = {k: rng.normal(size=(G, *s)).astype(np.float32) * 10.0 ** rng.integers(-3, 3) for k, s in shapes.items()}
        held = none_held(compression, arrays) if held is None else held
        sums, held = call(arrays, held)
        for key in shapes:
            assert sums[key].shape == shapes[key]
            went_in[key] += arrays[key].astype(np.float64).sum(0)
            came_out[key] += np.asarray(sums[key], np.float64)
            scale = np.abs(went_in[key]).max() + 1.0
            np.testing.assert_allclose(
                came_out[key], went_in[key] - total_held(held[key], shapes[key]), atol=1e-5 * scale, err_msg=f"{key} {step}"
            )
    if name != "sparse":
        # Rounded to 1 part in 254 or in 16 of the largest of a run, four devices and the sum.
        assert np.abs(total_held(held["matrix"], shapes["matrix"])).max() < np.abs(went_in["matrix"]).max()


def test_rounding_by_hand():
    """One run: scale 1 on each of four devices, then 4 x 127 = 508 over the sum, whose steps are 4."""
    array = np.zeros((G, 128), np.float32)
    array[:, 0], array[:, 1], array[0, 2] = 127.0, 1.4, 0.4
    compression = make_compression("int8")
    sums, held = summed_one(compression, array)
    np.testing.assert_allclose(sums[:3], [508.0, 4.0, 0.0])
    np.testing.assert_allclose(held.of_array[:, :3], [[0, 0.4, 0.4], *[[0, 0.4, 0]] * 3], atol=1e-6)
    # Each device rounds its quarter of the sum, whole runs of it: the first one has all 128.
    np.testing.assert_allclose(held.of_sum[0, :3], 0.0, atol=1e-6)


def test_sparse_by_hand():
    """Parts of 128, of which two elements each are sent, and of the sum of a part two again; the rest comes with the next sum."""
    array = np.zeros((G, 512), np.float32)
    array[:, 0], array[:, 1], array[:, 2] = 4.0, [1, 1, 3, 0], [0, 0, 1, 3]
    array[2, 200], array[3, 511] = -1.0, 2.0
    compression = make_compression("sparse", 2 / 128)
    sums, held = summed_one(compression, array)
    want = np.zeros(512)
    # Of the third element the fourth device sent 3; the first part's sum has room for two.
    want[[0, 1, 200, 511]] = 16.0, 5.0, -1.0, 2.0
    np.testing.assert_array_equal(sums, want)
    np.testing.assert_array_equal(held.of_array[:, 2], [0, 0, 1, 0])
    assert held.of_sum[0, 2] == 3 and np.count_nonzero(held.of_sum) == 1
    sums, held = summed_one(compression, np.zeros_like(array), held)
    assert sums[2] == 4.0 and np.count_nonzero(sums) == 1, "what was held back comes next"


@pytest.mark.parametrize(("fraction", "width"), [(0.01, 3 * 8), (1 / 32, 8 * 4 + 32), (0.3, 77 * 4 + 32), (1.0, 256 * 4 + 32)])
def test_rows_of_the_largest_elements(fraction, width):
    """Places are numbers or bits, whichever are shorter; what is read is what is the largest, bit for bit."""
    rows = np.random.default_rng(0).normal(size=(3, 256)).astype(np.float32)
    rows[1] = 0.0
    form = LargestElements(fraction)
    words = jax.jit(form.write)(rows)
    assert words.shape == (3, width) == (3, form.width(256)) and words.dtype == np.uint8
    count = math.ceil(fraction * 256)
    want = np.where(np.abs(rows) >= np.sort(np.abs(rows), -1)[:, -count, None], rows, 0)
    np.testing.assert_array_equal(form.read(words, 256), want)


@pytest.mark.parametrize("count", [1, 7, 40, 99, 100])
def test_largest_are_those_of_a_sort(count):
    """Many are equal, some zero, subnormal or infinite."""
    rng = np.random.default_rng(count)
    array = rng.integers(-4, 5, 100).astype(np.float32)
    array[:3] = [np.inf, 1e-40, -1e30]
    want = np.sort(np.argsort(-np.abs(array), stable=True)[:count])
    np.testing.assert_array_equal(np.flatnonzero(jax.jit(among_largest, static_argnums=1)(array, count)), want)


def test_sums_of_many_elements_are_rounded_not_thinned():
    dense, thin = (make_compression("sparse", fraction).bytes(4096, G) for fraction in (0.3, 0.2))
    assert dense == (G * (4 * 308 + 128), 4096 * 132 // 128)
    assert thin == (G * (4 * 205 + 128),) * 2


def test_small_arrays_are_summed_as_they_are():
    compression = make_compression("int8")
    arrays = {"small": np.full((G, 10), 1 / 3, np.float32), "large": np.ones((G, 200), np.float32)}
    held = none_held(compression, arrays, least=100)
    assert held["small"] is None and held["large"].of_array.shape == (G, 200)
    sums, after = summed(compression, arrays, held)
    np.testing.assert_allclose(sums["small"], 4 / 3, rtol=1e-6)
    assert after["small"] is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [4 * 128 * 3, 1000])
def test_bytes_in_the_compiled_program(name, size):
    """No all-reduce is left, and what is received is as `bytes` says: near a quarter of float32's, or 8 for an element sent and
    one sent of the sum."""
    compression = make_compression(name, 0.01)
    array = np.ones((G, size), np.float32)
    text = jax.jit(functools.partial(summed_one, compression)).lower(array).compile().as_text()
    found = collectives(text)
    by_kind = {c.kind: c.bytes for c in found}
    assert len(found) == 2 and (by_kind["all-to-all"], by_kind["all-gather"]) == compression.bytes(size, G)
    part = math.ceil(size / (G * 128)) * 128
    assert found[0].bytes == found[1].bytes == G * (8 * math.ceil(0.01 * part) if name == "sparse" else part * 132 // 128)


@functools.cache
def descent(name, feedback=True, steps=300, rate=0.1):
    """Distance to the optimum of mean_g |A_g (w - w_g)|^2 / 2 whose terms pull in different directions on each device."""
    rng = np.random.default_rng(3)
    size = 300
    curvature = rng.uniform(0.2, 1.0, (G, size)).astype(np.float32)
    centre = (rng.normal(size=(G, size)) * 5).astype(np.float32)
    best = (curvature * centre).sum(0) / curvature.sum(0)
    compression = None if name is None else make_compression(name, 0.1)

    @jax.jit
    def run():
        def step(carry, _):
            w, held = carry
            gradient = curvature * (w - centre)
            if compression is None:
                return (w - rate * gradient.mean(0), held), None
            total, after = summed_one(compression, gradient, held)
            return (w - rate * total / G, after if feedback else held), None

        held = jnp.zeros(()) if compression is None else none_held(compression, {"": curvature})[""]
        (w, _), _ = jax.lax.scan(step, (jnp.zeros(size), held), None, length=steps)
        return w

    return float(np.linalg.norm(run() - best) / np.linalg.norm(best))


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_descent_on_a_quadratic_ends_where_the_plain_one_does(name):
    assert descent(None) < 1e-3
    with_feedback, without = descent(name), descent(name, feedback=False)
    assert with_feedback < 5e-3
    assert without > 5 * with_feedback


def test_sparse_descent_needs_what_it_holds_back():
    """A tenth of the elements a step; without feedback the same large ones, which cancel, are sent again and again."""
    assert descent("sparse", steps=1000, rate=0.02) < 0.05
    assert descent("sparse", feedback=False, steps=1000, rate=0.02) > 0.5


def test_refusals():
    with pytest.raises(ValueError, match=r"unknown gradient compression 'int4'; expected one of \['fp8', 'int8', 'sparse'\]"):
        make_compression("int4")
    with pytest.raises(ValueError, match="fraction=0 of the elements to send"):
        make_compression("sparse", 0)
