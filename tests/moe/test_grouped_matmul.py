"""Grouped matmul against a loop in numpy. R rows, E groups, D contracted width, F output width."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from ernie_jax.moe import grouped_matmul as package
from ernie_jax.moe.grouped_matmul import BACKENDS, grouped_matmul
from ernie_jax.moe.grouped_matmul.blocks import block_counts, block_heights
from ernie_jax.native import switched_off

D, F = 6, 5

# (group sizes, R)
CASES = {
    "empty middle group, spare rows": ([3, 0, 2], 8),
    "only the last group": ([0, 0, 5], 8),
    "no rows in any group": ([0, 0, 0], 8),
    "no spare rows": ([3, 0, 2], 5),
    "one group": ([7], 9),
    "one row": ([0, 1], 1),
    "many sizes around the block heights": ([300, 0, 65, 64, 1, 255, 257, 63, 0, 512], 1600),
    "all in one group, not a multiple of a block": ([0, 517, 0], 517),
    "last block near the end of the buffer": ([60, 9], 70),
}


def inputs(sizes, num_rows, dtype=np.float32, spare=np.nan, seed=0):
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((num_rows, D))
    cotangent = rng.standard_normal((num_rows, F))
    rows[sum(sizes) :] = spare
    cotangent[sum(sizes) :] = spare
    weights = rng.standard_normal((len(sizes), D, F))
    return (*(jnp.asarray(a, dtype) for a in (rows, weights, cotangent)), jnp.asarray(sizes, jnp.int32))


def oracle(rows, weights, cotangent, sizes):
    """Output, row gradient and weight gradient by a loop over the groups in float64."""
    rows, weights, cotangent = (np.asarray(a, np.float64) for a in (rows, weights, cotangent))
    out, d_rows, d_weights = np.zeros((len(rows), F)), np.zeros_like(rows), np.zeros_like(weights)
    start = 0
    for e, size in enumerate(np.asarray(sizes)):
        own = slice(start, start + size)
        out[own] = rows[own] @ weights[e]
        d_rows[own] = cotangent[own] @ weights[e].T
        d_weights[e] = rows[own].T @ cotangent[own]
        start += size
    return out, d_rows, d_weights


def run(backend, rows, weights, cotangent, sizes):
    out, pullback = jax.vjp(lambda r, w: grouped_matmul(r, w, sizes, backend=backend), rows, weights)
    return (out, *pullback(cotangent))


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("case", CASES)
def test_value_and_gradients_equal_a_loop_over_groups(backend, case):
    sizes, num_rows = CASES[case]
    args = inputs(sizes, num_rows)
    got = jax.jit(run, static_argnums=0)(backend, *args)
    for name, a, b in zip(("out", "rows", "weights"), got, oracle(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("sizes", [[3, 0, 2], [0, 0, 5], [0, 0, 0]])
@pytest.mark.parametrize("spare", [0.0, np.nan, np.inf])
def test_empty_groups_and_spare_rows_get_exact_zeros(backend, sizes, spare):
    args = inputs(sizes, 8, spare=spare)
    out, d_rows, d_weights = jax.jit(run, static_argnums=0)(backend, *args)
    used = sum(sizes)
    assert not out[used:].any()
    assert not d_rows[used:].any()
    assert not d_weights[np.asarray(sizes) == 0].any()
    # What the spare rows hold changes nothing, down to the last bit.
    other = jax.jit(run, static_argnums=0)(backend, *inputs(sizes, 8, spare=3.0))
    for a, b in zip((out, d_rows, d_weights), other, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("backend", sorted(set(BACKENDS) - {"native"}))
def test_bfloat16_is_accumulated_in_float32(backend):
    # 1024 rows of one: a bfloat16 sum stops at 256.
    rows, weights, cotangent = (jnp.ones(s, jnp.bfloat16) for s in ((1024, D), (1, D, F), (1024, F)))
    got = jax.jit(run, static_argnums=0)(backend, rows, weights, cotangent, jnp.array([1024]))
    assert {a.dtype for a in got} == {jnp.dtype(jnp.bfloat16)}
    np.testing.assert_array_equal(np.asarray(got[2], np.float32), 1024.0)
    args = inputs([40, 0, 90], 140, jnp.bfloat16)
    got = jax.jit(run, static_argnums=0)(backend, *args)
    for a, b in zip(got, oracle(*args), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=8e-3, atol=2e-2)


def test_the_matmul_precision_in_force_at_the_call_holds_for_all_three_products():
    args = inputs([3, 0, 2], 8)

    def backward(rows, weights, cotangent):
        with jax.default_matmul_precision("highest"):
            _, pullback = jax.vjp(lambda r, w: grouped_matmul(r, w, args[3], backend="blocks"), rows, weights)
        return pullback(cotangent)

    precisions = [eqn.params["precision"] for eqn, _ in dots(jax.make_jaxpr(backward)(*args[:3]).jaxpr)]
    assert len(precisions) == 6
    assert all(p == (jax.lax.Precision.HIGHEST,) * 2 for p in precisions)


@pytest.mark.parametrize("policy", [None, "full"])
def test_under_a_scan_over_layers_with_and_without_recomputation(policy):
    num_layers, sizes = 3, jnp.array([4, 0, 3])
    rng = np.random.default_rng(1)
    stack = jnp.asarray(rng.standard_normal((num_layers, 3, D, D)) / 3, jnp.float32)
    x = jnp.asarray(rng.standard_normal((9, D)), jnp.float32).at[7:].set(jnp.nan)

    def loss(x, stack, backend):
        def layer(x, weights):
            return jnp.tanh(grouped_matmul(x, weights, sizes, backend=backend)), None

        return (jax.lax.scan(layer if policy is None else jax.checkpoint(layer), x, stack)[0] ** 2).sum()

    grad = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), static_argnums=2)
    got, want = grad(x, stack, "blocks"), grad(x, stack, "dense")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)
    assert not np.asarray(got[1][1])[:, 1].any()


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_under_shard_map_each_device_follows_its_own_sizes(backend):
    devices = jax.devices()
    if len(devices) < 8:
        pytest.fail("the suite runs on eight devices: set XLA_FLAGS=--xla_force_host_platform_device_count=8")
    mesh, shards = Mesh(np.array(devices[:8]), ("expert",)), 8
    rng = np.random.default_rng(2)
    sizes = rng.multinomial(60, np.ones(5) / 5, size=shards)[:, :3] * (np.arange(shards) != 3)[:, None]
    parts = [inputs(list(s), 70, seed=i) for i, s in enumerate(sizes)]
    rows, weights, cotangent, group_sizes = (jnp.concatenate(a) for a in zip(*parts, strict=True))
    spec = PartitionSpec("expert")
    product = jax.shard_map(
        lambda r, w, s: grouped_matmul(r, w, s, backend=backend), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )

    @jax.jit
    def step(rows, weights, cotangent, sizes):
        out, pullback = jax.vjp(lambda r, w: product(r, w, sizes), rows, weights)
        return (out, *pullback(cotangent))

    got = step(rows, weights, cotangent, group_sizes)
    want = [np.concatenate(a) for a in zip(*(oracle(*p) for p in parts), strict=True)]
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5)


def dots(jaxpr, loops=0):
    """Every dot_general of a jaxpr, with the number of loops around it."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn, loops
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from dots(inner, loops + (eqn.primitive.name in ("while", "scan")))


@pytest.mark.parametrize("sizes", [[512] * 32, [16384] + [0] * 31, [100] * 32, [0] * 32])
def test_work_follows_the_rows_routed(sizes):
    num_rows, d, f = 16384, 16, 8
    abstract = [jax.ShapeDtypeStruct(s, np.float32) for s in ((num_rows, d), (len(sizes), d, f), (num_rows, f))]
    sizes_spec = jax.ShapeDtypeStruct((len(sizes),), np.int32)
    jaxpr = jax.make_jaxpr(lambda *a: run("blocks", *a))(*abstract, sizes_spec).jaxpr
    found = list(dots(jaxpr))
    # Every product is one block's, and stands in the loop over blocks in the loop over groups.
    assert {loops for _, loops in found} == {2}
    heights = []
    for eqn, _ in found:
        (lhs_contract, _), _ = eqn.params["dimension_numbers"]
        free = 1 - lhs_contract[0]
        heights.append(eqn.invars[0].aval.shape[free if lhs_contract == (1,) else 0])
    tall, low = block_heights(num_rows, len(sizes))
    assert sorted(heights) == sorted([tall, low] * 3)
    # The trip counts come from `block_counts`: what is multiplied is the rows routed, and less than one low block a group.
    talls, lows = block_counts(np.asarray(sizes), (tall, low))
    multiplied = (talls * tall + lows * low).sum()
    assert sum(sizes) <= multiplied <= sum(sizes) + np.count_nonzero(sizes) * (low - 1)


@pytest.mark.parametrize(
    ("num_rows", "num_groups", "heights"),
    [
        (16384, 32, (512, 64)),
        (16384, 1, (512, 64)),
        (2048, 32, (64, 8)),
        (64, 32, (64, 8)),
        (70, 2, (64, 8)),
        (5, 2, (5, 5)),
        (1, 1, (1, 1)),
    ],
)
def test_block_heights_suit_the_average_group_and_fit_the_buffer(num_rows, num_groups, heights):
    assert block_heights(num_rows, num_groups) == heights


def test_compiled_temporaries_do_not_grow_with_the_groups():
    def temporaries(num_groups):
        d = f = 32
        shapes = ((2048, d), (num_groups, d, f), (2048, f))
        args = [jax.ShapeDtypeStruct(s, np.float32) for s in shapes]
        compiled = jax.jit(run, static_argnums=0).lower("blocks", *args, jax.ShapeDtypeStruct((num_groups,), np.int32)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # One group more costs its row of the plan and nothing of the size of its weights (4 KiB).
    assert (temporaries(64) - temporaries(8)) / 56 < 256


def test_auto_follows_the_platform_and_the_format_and_says_so_once(caplog):
    rows, weights, _, sizes = inputs([3, 0, 2], 8)
    package._choose.cache_clear()
    with caplog.at_level(logging.INFO, logger=package.__name__):
        for _ in range(2):
            native = jax.make_jaxpr(grouped_matmul)(rows, weights, sizes)
        half = jax.make_jaxpr(grouped_matmul)(rows.astype(jnp.bfloat16), weights.astype(jnp.bfloat16), sizes)
        with switched_off():
            other = jax.make_jaxpr(lambda *args: grouped_matmul(*args))(rows, weights, sizes)
    assert "ernie_grouped_rows" in str(native)
    assert "ffi_call" not in str(half) and "ffi_call" not in str(other)
    assert [r.getMessage() for r in caplog.records] == [
        "grouped_matmul backend on cpu: native",
        "grouped_matmul backend on cpu: blocks (not native: it multiplies float32 on CPUs)",
        "grouped_matmul backend on cpu: blocks (not native: they are switched off)",
    ]
    assert (package.AUTO["gpu"], package.AUTO["tpu"]) == ("pallas", "megablox")


def test_mistakes_are_named():
    rows, weights, _, sizes = inputs([3, 0, 2], 8)
    with pytest.raises(ValueError, match=r"'fast'.*\['blocks', 'dense', 'megablox', 'native', 'pallas', 'ragged_dot'\]"):
        grouped_matmul(rows, weights, sizes, backend="fast")
    with pytest.raises(ValueError, match=r"\(8, 5\), \(3, 6, 5\), \(3,\)"):
        grouped_matmul(rows[:, :5], weights, sizes)
    with pytest.raises(ValueError, match=r"\(2,\)"):
        grouped_matmul(rows, weights, sizes[:2])
    with pytest.raises(ValueError, match=r"float32 and weights are bfloat16"):
        grouped_matmul(rows, weights.astype(jnp.bfloat16), sizes)
    with pytest.raises(ValueError, match=r"'native' multiplies float32, got bfloat16; use 'auto' or 'blocks'"):
        grouped_matmul(rows.astype(jnp.bfloat16), weights.astype(jnp.bfloat16), sizes, backend="native")
    with pytest.raises(ValueError, match=r"integers, got float32"):
        grouped_matmul(rows, weights, sizes.astype(jnp.float32))
