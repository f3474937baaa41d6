"""Any mesh equals one device, in loss and in every gradient: dispatchers, skew, odd sizes, ZeRO, capacity."""

import jax
import numpy as np
import pytest

from ernie_jax.config import ComputeConfig
from ernie_jax.sharding import make_mesh, map_variables, one_device_mesh
from ernie_jax.testing import loss_and_gradients, random_batch, tiny_moe, worst_difference

CONFIG = tiny_moe(num_key_value_heads=4)
MESHES = {
    "data 8": {"data": 8},
    "tensor 4": {"tensor": 4},
    "expert 8": {"expert": 8},
    "data 2 x tensor 2 x expert 2": {"data": 2, "tensor": 2, "expert": 2},
    "data 4 x expert 2": {"data": 4, "expert": 2},
    "data 2 x expert 4": {"data": 2, "expert": 4},
}


def mesh_of(sizes):
    return make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])


def all_to(expert):
    """An edit of the state after which every token prefers one expert by far (its bias is raised)."""

    def edit(state):
        def change(path, variable):
            value = variable[...]
            return value.at[..., expert].set(10.0) if path.endswith("router/bias") else value

        return map_variables(change, state)

    return edit


# Who is favoured in all layers: nobody, the first expert, the last, and a shard of two whose other devices sit idle.
SKEWS = {"uniform": None, "all to the first expert": all_to(0), "all to the last expert": all_to(7)}
_oracles: dict = {}


def oracle(batch_shape, skew, **compute):
    key = (batch_shape, skew, tuple(sorted(compute.items())))
    if key not in _oracles:
        _oracles[key] = loss_and_gradients(
            CONFIG, random_batch(CONFIG, *batch_shape), one_device_mesh(), edit=SKEWS[skew], compute=ComputeConfig(**compute)
        )
    return _oracles[key]


def check(sizes, batch_shape=(8, 12), skew="uniform", rules="tp_sp", dispatch="auto", **compute):
    expected = oracle(batch_shape, skew, **compute)
    result = loss_and_gradients(
        CONFIG,
        random_batch(CONFIG, *batch_shape),
        mesh_of(sizes),
        rules=rules,
        edit=SKEWS[skew],
        compute=ComputeConfig(dispatch=dispatch, **compute),
    )
    np.testing.assert_allclose(result.loss, expected.loss, rtol=1e-5)
    difference, path = worst_difference(expected, result)
    assert difference < 1e-5, path
    for mine, theirs in zip(result.parts.stats, expected.parts.stats, strict=True):
        np.testing.assert_array_equal(mine.load, theirs.load)
        np.testing.assert_array_equal(mine.dropped, theirs.dropped)
    return result


@pytest.mark.parametrize("mesh", MESHES)
def test_mesh_equals_one_device(mesh):
    check(MESHES[mesh])


@pytest.mark.parametrize("mesh", ["data 8", "data 2 x tensor 2 x expert 2"])
def test_zero_3_equals_one_device(mesh):
    check(MESHES[mesh], rules="fsdp")


@pytest.mark.parametrize("skew", ["all to the first expert", "all to the last expert"])
@pytest.mark.parametrize("dispatch", ["all_to_all", "replicated"])
def test_worst_skew(dispatch, skew):
    check(MESHES["data 2 x expert 4"], skew=skew, dispatch=dispatch)


@pytest.mark.parametrize("mesh", ["data 2 x tensor 2 x expert 2", "expert 8"])
def test_tokens_that_do_not_divide(mesh):
    check(MESHES[mesh], batch_shape=(3, 7))


def test_replicated_dispatch():
    check(MESHES["data 2 x tensor 2 x expert 2"], dispatch="replicated")


@pytest.mark.parametrize("mesh", ["expert 8", "data 2 x tensor 2 x expert 2"])
def test_capacity_drops_the_same_tokens_on_every_mesh(mesh):
    result = check(MESHES[mesh], capacity_factor=0.75)
    assert all(s.dropped > 0 for s in result.parts.stats)
    # Exact: what is dispatched and what is dropped add up to every choice of every valid token.
    for stats in result.parts.stats:
        assert stats.load.sum() + stats.dropped == stats.tokens * 3


def test_generous_capacity_drops_nothing_and_does_not_crash():
    result = check(MESHES["data 2 x expert 4"], capacity_factor=64.0, skew="all to the last expert")
    assert all(s.dropped == 0 for s in result.parts.stats)


def test_fewer_kv_heads_than_tensor_shards():
    config = tiny_moe(num_key_value_heads=1)
    batch = random_batch(config, 4, 12)
    one = loss_and_gradients(config, batch, one_device_mesh())
    four = loss_and_gradients(config, batch, mesh_of({"tensor": 4}))
    assert worst_difference(one, four)[0] < 1e-5


def test_remat_changes_no_gradient_and_no_count():
    """Case 5: counts are returned values, not side effects that a second forward would repeat."""
    expected = oracle((8, 12), "uniform")
    for remat in ("full", ("attn_out", "expert_act")):
        result = loss_and_gradients(CONFIG, random_batch(CONFIG, 8, 12), one_device_mesh(), compute=ComputeConfig(remat=remat))
        assert worst_difference(expected, result)[0] < 1e-5
        for mine, theirs in zip(result.parts.stats, expected.parts.stats, strict=True):
            np.testing.assert_array_equal(mine.load, theirs.load)
