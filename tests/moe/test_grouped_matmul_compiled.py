"""Grouped matmul as the train step holds it, and what its compiled loops touch. R rows, E groups, D and F widths, L layers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from ernie_jax.moe.grouped_matmul import BACKENDS, grouped_matmul

R, E, D, F = 1536, 24, 40, 56


def computations(text):
    """Name -> lines of each computation of an HLO module's text."""
    found, lines = {}, []
    for line in text.splitlines():
        if (header := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line)) is not None:
            lines = found[header.group(1)] = []
        elif line.startswith("}"):
            lines = []
        else:
            lines.append(line)
    return found


def reached(module, name):
    """The lines of a computation and of all it calls."""
    todo, seen, lines = [name], set(), []
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            lines += module[name]
            todo += [n for line in module[name] for n in re.findall(r"(?:calls|to_apply|body|condition)=%?([\w.-]+)", line)]
    return lines


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_loop_copies_or_converts_a_whole_buffer(dtype):
    def step(rows, weights, cotangent, sizes):
        out, pullback = jax.vjp(lambda r, w: grouped_matmul(r, w, sizes, backend="blocks"), rows, weights)
        return (out, *pullback(cotangent))

    shapes = [jax.ShapeDtypeStruct(s, dtype) for s in ((R, D), (E, D, F), (R, F))]
    module = computations(jax.jit(step).lower(*shapes, jax.ShapeDtypeStruct((E,), np.int32)).compile().as_text())
    bodies = {body for lines in module.values() for line in lines for body in re.findall(r"body=%?([\w.-]+)", line)}
    assert bodies
    lines = [line for body in bodies for line in reached(module, body)]
    # The check sees the loops: each writes its buffer in place, a few rows (or one group's gradient) at a time.
    assert any("dynamic-update-slice" in line and f"[{R},{F}]" in line for line in lines)
    whole = rf"\[(?:{R},{D}|{R},{F}|{E},{D},{F})\]"
    passes = [
        line.strip() for line in lines if re.search(rf"= \w+{whole}\S* (?:copy|convert|transpose|bitcast-convert|select)\(", line)
    ]
    assert not passes


@pytest.mark.parametrize("backend", sorted(set(BACKENDS) - {"dense"}))
def test_layers_scanned_and_recomputed_inside_shard_map(backend):
    num_layers, shards, per_shard, num_rows, width = 3, 4, 2, 90, 8
    # Spare rows, an idle shard, a shard whose rows all belong to one expert, an idle expert.
    sizes = jnp.array([[70, 5], [0, 0], [0, 90], [33, 0]], jnp.int32)
    rng = np.random.default_rng(4)
    rows = jnp.asarray(rng.standard_normal((shards, num_rows, width)), jnp.float32)
    weights = jnp.asarray(rng.standard_normal((num_layers, shards, per_shard, width, width)) / 3, jnp.float32)

    def layers(rows, weights, sizes, backend):
        def layer(x, w):
            return jnp.tanh(grouped_matmul(x, w, sizes, backend=backend)), None

        return jax.lax.scan(jax.checkpoint(layer), rows, weights)[0]

    def sharded(rows, weights):
        spec = PartitionSpec("expert")
        mesh = Mesh(np.array(jax.devices()[:shards]), ("expert",))
        product = jax.shard_map(
            lambda x, w, s: layers(x[0], w[:, 0], s[0], backend)[None],
            mesh=mesh,
            in_specs=(spec, PartitionSpec(None, "expert"), spec),
            out_specs=spec,
            check_vma=False,
        )
        return (product(rows, weights, sizes) ** 2).sum()

    def one_by_one(rows, weights):
        return sum((layers(rows[i], weights[:, i], sizes[i], "dense") ** 2).sum() for i in range(shards))

    got = jax.jit(jax.value_and_grad(sharded, argnums=(0, 1)))(rows, weights)
    want = jax.jit(jax.value_and_grad(one_by_one, argnums=(0, 1)))(rows, weights)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)
    idle = np.asarray(sizes) == 0
    assert not np.asarray(got[1][1])[:, idle].any()
