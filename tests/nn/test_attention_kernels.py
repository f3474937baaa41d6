"""Attention kernels against a loop over numpy, against each other, and what their compiled programs hold."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ernie_jax.nn.attention_kernels import ATTENTION_KERNELS, AttentionMask, attend, choose_implementation, tile_table
from ernie_jax.nn.attention_kernels.cudnn import library_attention
from ernie_jax.nn.attention_kernels.tiles import Visits
from ernie_jax.sharding import Layout, make_mesh, rules_named, use_layout

PACKED = [[1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 0], [1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 0, 0, 0]]
LEFT_PADDED = [[0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], [1] * 13]
SEGMENTS = {"causal": [[1] * 13] * 2, "packed": PACKED, "left_padded": LEFT_PADDED}


def inputs(batch, queries, keys, heads, kv_heads, width=8, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [
        (batch, queries, heads, width),
        (batch, keys, kv_heads, width),
        (batch, keys, kv_heads, width),
        (batch, queries, heads, width),
    ]
    return [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes]


def ids(rows):
    return jnp.asarray(rows, jnp.int32)


def by_hand(q, k, v, mask):
    """One query and one head at a time, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    q_seg, k_seg, q_at, k_at = (
        np.asarray(x) for x in (mask.query_segment_ids, mask.key_segment_ids, mask.query_index, mask.key_index)
    )
    out = np.zeros(q.shape)
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            keys = [s for s in range(k.shape[1]) if k_seg[b, s] == q_seg[b, t] != 0 and k_at[b, s] <= q_at[b, t]]
            for h in range(q.shape[2]) if keys else ():
                kv = h // (q.shape[2] // k.shape[2])
                scores = np.array([q[b, t, h] @ k[b, s, kv] for s in keys]) / np.sqrt(q.shape[-1])
                weights = np.exp(scores - scores.max())
                out[b, t, h] = (weights / weights.sum()) @ v[b, keys, kv]
    return out


@functools.partial(jax.jit, static_argnames=("implementation", "chunk"))
def value_and_gradients(implementation, q, k, v, mask, weight, chunk=4):
    """The mask is an argument, so that cases of one shape share a compiled program."""

    def loss(q, k, v):
        out = attend(q, k, v, mask, implementation=implementation, chunk=chunk)
        return jnp.sum(out * weight), out

    gradients, out = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)
    return [out, *gradients]


@pytest.mark.parametrize("implementation", ["dense", "chunked", "native"])
@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (2, 2), (8, 2)])
def test_value_equals_the_loop(implementation, segments, heads, kv_heads):
    q, k, v, weight = inputs(2, 13, 13, heads, kv_heads)
    mask = AttentionMask.causal(ids(SEGMENTS[segments]))
    out = value_and_gradients(implementation, q, k, v, mask, weight)[0]
    np.testing.assert_allclose(out, by_hand(q, k, v, mask), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (2, 2), (8, 2)])
@pytest.mark.parametrize("chunk", [4, 64])
def test_chunked_equals_dense_in_value_and_gradients(segments, heads, kv_heads, chunk):
    q, k, v, weight = inputs(2, 13, 13, heads, kv_heads)
    mask = AttentionMask.causal(ids(SEGMENTS[segments]))
    dense = value_and_gradients("dense", q, k, v, mask, weight)
    chunked = value_and_gradients("chunked", q, k, v, mask, weight, chunk)
    for got, expected in zip(chunked, dense, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "kv_heads", "width", "documents"),
    [(2, 333, 6, 3, 40, 3), (1, 600, 2, 1, 64, 5), (3, 37, 4, 4, 72, 2), (1, 500, 5, 1, 128, 1)],
)
def test_native_equals_chunked_over_many_tiles(batch, tokens, heads, kv_heads, width, documents):
    """Several tiles of queries and blocks of keys, of sizes that no register divides; documents that begin within a tile."""
    q, k, v, weight = inputs(batch, tokens, tokens, heads, kv_heads, width=width)
    segments = np.sort(np.random.default_rng(1).integers(documents > 1, documents + 1, (batch, tokens)))
    segments[:, -7:] = 0
    mask = AttentionMask.causal(ids(segments))
    with jax.default_matmul_precision("highest"):
        native, chunked = (value_and_gradients(name, q, k, v, mask, weight, 64) for name in ("native", "chunked"))
    for got, expected in zip(native, chunked, strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("implementation", ["dense", "chunked", "native"])
def test_gradients_equal_finite_differences(implementation):
    q, k, v, weight = inputs(1, 6, 6, 2, 1, width=4)
    mask = AttentionMask.causal(ids([[1, 1, 1, 2, 2, 0]]))
    gradients = value_and_gradients(implementation, q, k, v, mask, weight)[1:]
    for position, gradient in enumerate(gradients):
        direction = np.random.default_rng(5).standard_normal(gradient.shape)
        moved = []
        for sign in (1, -1):
            arrays = [np.asarray(x, np.float64) for x in (q, k, v)]
            arrays[position] += sign * 1e-5 * direction
            moved.append((by_hand(*arrays, mask) * np.asarray(weight, np.float64)).sum())
        np.testing.assert_allclose((gradient * direction).sum(), (moved[0] - moved[1]) / 2e-5, rtol=1e-4)


@pytest.mark.parametrize("implementation", ["dense", "chunked", "native"])
@pytest.mark.parametrize("queries", [1, 3])
def test_cached_steps_equal_the_whole_sequence(implementation, queries):
    """Row 0 is left padded; slots after the new tokens are empty, and hold values that must not count."""
    q, k, v, weight = inputs(2, 10, 16, 4, 2)
    segments = ids([[0, 0, 1, 1, 1, 1, 1, 1, 1, 1], [1] * 10])
    whole = attend(q, k[:, :10], v[:, :10], AttentionMask.causal(segments))
    at = 5
    new = slice(at, at + queries)
    slots = jnp.zeros((2, 16), jnp.int32).at[:, : at + queries].set(segments[:, : at + queries])
    for index in (at, jnp.asarray(at), jnp.asarray([at, at])):
        mask = AttentionMask.cached(segments[:, new], slots, index)
        step = attend(q[:, new], k, v, mask, implementation=implementation, chunk=4)
        np.testing.assert_allclose(step, whole[:, new], rtol=1e-5, atol=1e-6)
    dense = value_and_gradients("dense", q[:, new], k, v, mask, weight[:, new])
    for got, expected in zip(value_and_gradients(implementation, q[:, new], k, v, mask, weight[:, new]), dense, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_cached_rows_may_stand_at_different_slots():
    q, k, v, _ = inputs(2, 1, 8, 2, 1)
    slots = ids([[1] * 3 + [0] * 5, [1] * 6 + [0] * 2])
    mask = AttentionMask.cached(ids([[1], [1]]), slots, ids([2, 5]))
    np.testing.assert_allclose(attend(q, k, v, mask), by_hand(q, k, v, mask), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(mask.allowed().sum(-1), [[3], [6]])


@pytest.mark.parametrize("implementation", ["dense", "chunked", "native"])
@pytest.mark.parametrize("rows", [PACKED, LEFT_PADDED, [[0] * 13] * 2])
def test_padding_is_zero_and_has_no_gradient(implementation, rows):
    q, k, v, weight = inputs(2, 13, 13, 4, 2)
    # Large values would turn any masking by subtraction into infinities.
    q, k = q * 1e3, k * 1e3
    out, *gradients = value_and_gradients(implementation, q, k, v, AttentionMask.causal(ids(rows)), weight)
    padding = np.asarray(rows) == 0
    for array in (out, *gradients):
        assert np.isfinite(array).all()
        assert (np.asarray(array)[padding] == 0).all()


@pytest.mark.parametrize("implementation", ["dense", "chunked", "native"])
def test_documents_do_not_see_each_other(implementation):
    q, k, v, weight = inputs(1, 13, 13, 4, 2)
    segments = ids([PACKED[0]])
    mask = AttentionMask.causal(segments)
    run = jax.jit(lambda q, k, v: attend(q, k, v, mask, implementation=implementation, chunk=4))
    for changed, kept in ((1, 2), (2, 1), (3, 2), (0, 3)):
        other = (segments == changed)[..., None, None]
        moved = run(q, jnp.where(other, 50.0, k), jnp.where(other, -3.0, v))
        own = np.asarray(segments == kept)
        np.testing.assert_array_equal(np.asarray(moved)[own], np.asarray(run(q, k, v))[own])
        of_kept = jnp.where((segments == kept)[..., None, None], weight, 0)
        for gradient in value_and_gradients(implementation, q, k, v, mask, of_kept)[1:]:
            assert (np.asarray(gradient)[~own] == 0).all()
            assert (np.asarray(gradient)[own] != 0).any()


@pytest.mark.parametrize("implementation", ["dense", "chunked"])
def test_bfloat16_stays_near_float32(implementation):
    q, k, v, weight = inputs(2, 13, 13, 4, 2)
    mask = AttentionMask.causal(ids(PACKED))
    exact = value_and_gradients("dense", q, k, v, mask, weight)
    rounded = value_and_gradients(implementation, *(x.astype(jnp.bfloat16) for x in (q, k, v)), mask, weight)
    for got, expected in zip(rounded, exact, strict=True):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(got.astype(jnp.float32), expected, atol=0.06, rtol=0.05)


def test_chunked_under_checkpoint_and_scan():
    q, _, _, weight = inputs(2, 13, 13, 4, 4)
    mask = AttentionMask.causal(ids(PACKED))

    def stack(implementation):
        def layer(x, _):
            return x + attend(x, x * 0.5, jnp.sin(x), mask, implementation=implementation, chunk=4), None

        def loss(x):
            return jnp.sum(jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, length=3)[0] * weight)

        return jax.jit(jax.value_and_grad(loss))(q)

    for got, expected in zip(stack("chunked"), stack("dense"), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def temporary_bytes(implementation, tokens):
    q, k, v, weight = inputs(1, tokens, tokens, 2, 1)
    mask = AttentionMask.causal(jnp.ones((1, tokens), jnp.int32))
    loss = lambda q, k, v: jnp.sum(attend(q, k, v, mask, implementation=implementation, chunk=64) * weight)  # noqa: E731
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(q, k, v).compile().memory_analysis().temp_size_in_bytes


def test_memory_is_linear_for_chunked_and_quadratic_for_dense():
    chunked = [temporary_bytes("chunked", tokens) for tokens in (1024, 2048, 4096)]
    assert chunked[1] < 2.2 * chunked[0]
    assert chunked[2] < 2.2 * chunked[1]
    dense = [temporary_bytes("dense", tokens) for tokens in (512, 1024)]
    assert 3.5 < dense[1] / dense[0] < 4.5
    assert chunked[0] < dense[1] / 4


def computed_tiles(rows, chunk):
    return int(tile_table(AttentionMask.causal(ids(rows)), chunk).sum())


def test_tiles_computed():
    assert computed_tiles([[1] * 64], 8) == 8 * 9 // 2
    assert computed_tiles([[1] * 61], 8) == 8 * 9 // 2
    # Four documents of two tiles each: three pairs of tiles a document.
    assert computed_tiles([[d for d in (1, 2, 3, 4) for _ in range(16)]], 8) == 4 * 3
    # A boundary within a tile: that tile meets both neighbours.
    assert computed_tiles([[1] * 12 + [2] * 12], 8) == 1 + 2 + 2
    # Padding tiles are nobody's work; rows of a batch share one table.
    assert computed_tiles([[0] * 32 + [1] * 32], 8) == 4 * 5 // 2
    assert computed_tiles([[0] * 64], 8) == 0
    assert computed_tiles([[0] * 32 + [1] * 32, [1] * 32 + [0] * 32], 8) == 2 * 4 * 5 // 2


@pytest.mark.parametrize("rows", [PACKED, LEFT_PADDED])
def test_no_tile_with_work_is_left_out(rows):
    mask = AttentionMask.causal(ids(rows))
    seen = np.zeros((2, 16, 16), bool)
    seen[:, :13, :13] = mask.allowed()
    needed = seen.reshape(2, 4, 4, 4, 4).any(axis=(0, 2, 4))
    table = np.asarray(tile_table(mask, 4))
    assert (table | ~needed).all()
    visits = Visits.of(jnp.asarray(table))
    for row, order, length in zip(table, visits.order, visits.length, strict=True):
        np.testing.assert_array_equal(order[:length], np.flatnonzero(row))


def test_chunked_does_not_touch_tiles_it_skips():
    """A NaN in a tile that is multiplied at all, even by zero, would reach the output."""
    q, k, v, weight = inputs(1, 16, 16, 2, 1)
    mask = AttentionMask.causal(ids([[1] * 8 + [2] * 8]))
    v = v.at[:, 8:].set(jnp.nan)
    out, d_q, d_k, _ = value_and_gradients("chunked", q, k, v, mask, weight)
    for array in (out, d_q, d_k):
        assert np.isfinite(array[:, :8]).all()
        assert np.isnan(array[:, 8:]).any()


def loop_collectives(hlo):
    """Names of all collectives, and of those inside a loop's body or condition."""
    kinds = r"(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
    everywhere, inside = [], []
    bodies = set(re.findall(r"(?:body|condition)=%?([\w.\-]+)", hlo))
    name = ""
    for line in hlo.splitlines():
        header = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        name = header.group(1) if header else name
        found = re.search(kinds, line)
        if found:
            everywhere.append(found.group(1))
            if name in bodies:
                inside.append(found.group(1))
    return everywhere, inside


@pytest.mark.parametrize("implementation", ["dense", "chunked", "native"])
def test_sharded_over_batch_and_heads(implementation):
    mesh = make_mesh(data=2, tensor=2, expert=2)
    layout = Layout(mesh, rules_named("tp_sp"))
    q, k, v, weight = inputs(4, 13, 13, 8, 2)
    segments = ids(PACKED + LEFT_PADDED)
    heads = NamedSharding(mesh, P(("data", "expert"), None, "tensor", None))
    tokens = NamedSharding(mesh, P(("data", "expert"), None))

    def step(layout, q, k, v, weight, segments):
        def loss(q, k, v):
            with use_layout(layout):
                out = attend(q, k, v, AttentionMask.causal(segments), implementation=implementation, chunk=4)
            return jnp.sum(out * weight), out

        gradients, out = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)
        return [out, *gradients]

    expected = jax.jit(functools.partial(step, None))(q, k, v, weight, segments)
    # Among shards the layout says how heads and batch are cut; the kernels of the compiler's own read it from the arrays.
    sharded = jax.jit(functools.partial(step, layout), in_shardings=(heads,) * 4 + (tokens,), out_shardings=heads)
    arguments = [jax.device_put(x, heads) for x in (q, k, v, weight)] + [jax.device_put(segments, tokens)]
    compiled = sharded.lower(*arguments).compile()
    for got, one_device in zip(compiled(*arguments), expected, strict=True):
        np.testing.assert_allclose(got, one_device, rtol=1e-5, atol=1e-6)
    everywhere, inside = loop_collectives(compiled.as_text())
    assert inside == []
    # The one thing shared is the table of tiles.
    assert everywhere == (["all-reduce"] if implementation == "chunked" else [])


def test_collective_reader_sees_a_loop():
    """Guards the test above: a sum over shards inside a loop is found, and told from one outside."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("data")))
    inner = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y * jnp.tanh(y).sum(), x))
    outer = jax.jit(lambda x: x.sum())
    assert loop_collectives(inner.lower(x).compile().as_text())[1]
    everywhere, inside = loop_collectives(outer.lower(x).compile().as_text())
    assert everywhere and not inside


def test_library_kernel_has_the_same_mask_and_grouping():
    """The function behind cuDNN, run through XLA's implementation of the same call."""
    q, k, v, weight = inputs(2, 13, 13, 4, 2)
    mask = AttentionMask.causal(ids(PACKED))

    def loss(q, k, v):
        out = library_attention(q, k, v, mask, "xla")
        return jnp.sum(out * weight), out

    gradients, out = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)
    for got, expected in zip([out, *gradients], value_and_gradients("dense", q, k, v, mask, weight), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_cudnn_says_what_it_needs(monkeypatch):
    q, k, v, _ = inputs(1, 4, 4, 2, 1)
    mask = AttentionMask.causal(ids([[1] * 4]))
    with pytest.raises(ValueError, match=r"needs an NVIDIA GPU, this is 'cpu'.*'chunked'"):
        attend(q, k, v, mask, implementation="cudnn")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(ValueError, match=r"bfloat16 or float16, got q float32.*compute in bfloat16"):
        attend(q, k, v, mask, implementation="cudnn")


def test_choose_implementation():
    choose = lambda name, length, backend, dtype: choose_implementation(  # noqa: E731
        name, query_length=length, backend=backend, chunk_from=2048, dtype=dtype
    )
    assert choose("auto", 64, "gpu", jnp.bfloat16) == "cudnn"
    assert choose("auto", 64, "gpu", jnp.float16) == "cudnn"
    assert choose("auto", 64, "gpu", jnp.float32) == "dense"
    assert choose("auto", 4096, "gpu", jnp.float32) == "chunked"
    assert choose("auto", 2048, "cpu", jnp.bfloat16) == "dense"
    assert choose("auto", 2049, "tpu", jnp.bfloat16) == "chunked"
    natively = functools.partial(choose_implementation, "auto", query_length=64, chunk_from=2048, native=True)
    assert natively(backend="cpu", dtype=jnp.float32) == "native"
    assert natively(backend="cpu", dtype=jnp.bfloat16) == "dense"
    assert natively(backend="tpu", dtype=jnp.float32) == "dense"
    for name in ATTENTION_KERNELS:
        assert choose(name, 1, "cpu", jnp.float32) == name
    with pytest.raises(
        ValueError, match=r"unknown attention 'flash'; expected 'auto' or one of \['chunked', 'cudnn', 'dense', 'native'\]"
    ):
        choose("flash", 1, "cpu", jnp.float32)


def test_attend_refuses_what_does_not_fit():
    q, k, v, _ = inputs(1, 4, 4, 4, 2)
    mask = AttentionMask.causal(ids([[1] * 4]))
    with pytest.raises(ValueError, match=r"unknown attention 'flash'.*'dense'"):
        attend(q, k, v, mask, implementation="flash")
    with pytest.raises(ValueError, match="3 query heads cannot share 2 kv heads"):
        attend(q[:, :, :3], k, v, mask)
    with pytest.raises(ValueError, match=r"queries \(1, 4\).*q has \(1, 3\)"):
        attend(q[:, :3], k, v, mask)
    with pytest.raises(ValueError, match="expected q"):
        attend(q, k, v[:, :2], mask)
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        attend(q, k, v, mask, implementation="chunked", chunk=0)
