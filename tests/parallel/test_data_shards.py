"""Sums over data shards whose arrays are split over other axes too: nothing is lost over steps, and each device sends its piece."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ernie_jax.parallel import (
    held_by_arrays,
    held_specs,
    make_compression,
    nothing_held_by_shards,
    summed_over_data_shards,
)
from ernie_jax.sharding import make_layout, make_mesh
from ernie_jax.testing import collectives, tiny_moe

G = 2
# Odd sizes: 3 x 35 = 105 and 5 x 7 x 3 = 105 elements a piece, no whole runs of 128, and one array that no axis splits.
SHAPES = {"experts": (6, 35), "both": (5, 14, 6), "whole": (11, 31), "small": (8,)}
SPECS = {"experts": P("expert"), "both": P(None, "expert", "tensor"), "whole": P(), "small": P("tensor")}
PIECES = {"experts": (2, 1), "both": (1, 2, 2), "whole": (1, 1)}


@functools.cache
def layout():
    return make_layout(make_mesh(data=G, expert=2, tensor=2), tiny_moe())


def body(whole, rows):
    """Arrays that are known by hand: each row's number times one array, and the number of rows."""
    arrays = {name: jnp.einsum("ab,...->...", rows["factor"], value) for name, value in whole.items()}
    return arrays, rows["factor"].size


def summed(compression, whole, rows, held):
    return summed_over_data_shards(body, whole, rows, held, SPECS, layout(), compression)


def nothing(compression):
    held = nothing_held_by_shards(compression, SHAPES, SPECS, layout(), least=100)
    return jax.device_put(held, jax.tree.map(lambda s: NamedSharding(layout().mesh, s), held_specs(held, SPECS)))


def total_held(held, pieces):
    """What all devices together hold back of one array."""
    total = np.asarray(held.of_array, np.float64).sum(0)
    of_sum = np.asarray(held.of_sum, np.float64)
    size = [n // p for n, p in zip(total.shape, pieces, strict=True)]
    for place in itertools.product(*map(range, pieces)):
        block = tuple(slice(i * n, (i + 1) * n) for i, n in zip(place, size, strict=True))
        # The parts of the shards, one after the other, are the piece.
        total[block] += of_sum[(slice(None), *place)].reshape(-1)[: np.prod(size)].reshape(size)
    return total


@pytest.mark.parametrize("name", ["int8", "sparse"])
def test_what_went_in_came_out_or_is_still_held(name):
    compression = make_compression(name, 0.1)
    rng = np.random.default_rng(0)
    held, went_in, came_out = nothing(compression), dict.fromkeys(SHAPES, 0.0), dict.fromkeys(SHAPES, 0.0)
    assert {k: h and h.of_sum.shape[1:-1] for k, h in held.items()} == {**PIECES, "small": None}
    call = jax.jit(functools.partial(summed, compression))
    for _ in range(4):
        whole = {k: rng.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}
        # The second shard's rows weigh far more than the first's.
        rows = {"factor": np.asarray([[0.01, 0.02, 3.0, -8.0], [0.5, 0.0, 0.25, 1.0]], np.float32)}
        sums, count, held = call(whole, rows, held)
        assert count == 8
        for key, value in whole.items():
            assert sums[key].sharding.is_equivalent_to(NamedSharding(layout().mesh, SPECS[key]), value.ndim)
            went_in[key] += rows["factor"].astype(np.float64).sum() * value
            came_out[key] += np.asarray(sums[key], np.float64)
            left = total_held(held[key], PIECES[key]) if held[key] else 0.0
            np.testing.assert_allclose(
                came_out[key] + left, went_in[key], atol=1e-5 * (1 + np.abs(went_in[key]).max()), err_msg=key
            )
    assert held["small"] is None and all(np.abs(np.asarray(h.of_array)).max() > 1e-3 for h in held.values() if h)
    moved = jax.jit(lambda h: held_by_arrays(h, SPECS, layout()))({k: h for k, h in held.items() if h})
    for key, own in moved.items():
        assert not np.asarray(own.of_sum).any()
        np.testing.assert_allclose(np.asarray(own.of_array, np.float64).sum(0), total_held(held[key], PIECES[key]), atol=1e-6)


def test_bytes_are_of_the_pieces():
    """Of 105 elements, one piece of a split array, two runs of 128 with four bytes of scale each travel, twice."""
    compression = make_compression("int8")
    whole = {k: jnp.ones(s) for k, s in SHAPES.items()}
    text = (
        jax.jit(functools.partial(summed, compression)).lower(whole, {"factor": jnp.ones((1, 4))}, nothing(compression)).compile()
    )
    found = [c for c in collectives(text.as_text()) if "compressed_sum" in c.name]
    for kind in ("all-to-all", "all-gather"):
        # 341 elements of the whole one are four runs.
        assert sorted(c.bytes for c in found if c.kind == kind) == [2 * 132, 2 * 132, 4 * 132]
    # Device d is of data shard d // 4.
    assert all(set(c.groups) == {(d, d + 4) for d in range(4)} for c in found)


def test_refusals():
    held = {}
    with pytest.raises(ValueError, match=r"the mesh has pipeline=2"):
        summed_over_data_shards(
            body, {}, {}, held, {}, make_layout(make_mesh(data=2, pipeline=2, tensor=2), tiny_moe()), make_compression("int8")
        )
    with pytest.raises(ValueError, match=r"w with 0 more is split over the data axis"):
        summed_over_data_shards(body, {}, {}, held, {"w": P(None, ("data", "expert"))}, layout(), make_compression("int8"))
