"""Any mesh equals one device in loss and every gradient, whatever the rows hold: text, images, both, or images on one device."""

import jax
import numpy as np
import pytest

from ernie_jax.config import ComputeConfig
from ernie_jax.objectives.pretraining import RouterLossWeights, TokenWeights
from ernie_jax.sharding import make_mesh, map_variables, one_device_mesh
from ernie_jax.testing import BATCHES, loss_and_gradients, multimodal_rows, tiny_vl, worst_difference

CONFIG = tiny_vl(num_key_value_heads=4)
MESHES = {
    "data 8": {"data": 8},
    "tensor 4": {"tensor": 4},
    "expert 8": {"expert": 8},
    "data 2 x tensor 2 x expert 2": {"data": 2, "tensor": 2, "expert": 2},
}
WEIGHTS = RouterLossWeights(aux=0.1, z=0.01, orthogonal=0.1, vision=0.5)
TOKENS = TokenWeights(text=0.7, multimodal=1.3)
_oracles: dict = {}


def skewed(state):
    """Every token prefers one expert of its own modality: the first of text, the last of vision."""

    def change(path, variable):
        value = variable[...]
        expert = {"router/bias": 0, "vision_router/bias": 7}.get("/".join(path.split("/")[-2:]))
        return value if expert is None else value.at[..., expert].set(10.0)

    return map_variables(change, state)


def evaluate(rows, mesh, **options):
    size = mesh.shape
    # Room for any of the batches, so that all of them share one compiled program a mesh.
    room = {1: 448, 4: 160, 8: 64}[mesh.size]
    batch = rows.batch(size["data"] * size["expert"], size["tensor"] * size["pipeline"], max_patches=room)
    return loss_and_gradients(CONFIG, batch, mesh, weights=WEIGHTS, token_weights=TOKENS, **options)


def check(sizes, name="mixed", tokens=24, edit=None, **options):
    rows = multimodal_rows(CONFIG, name, tokens)
    compute = options.get("compute", ComputeConfig())
    key = (name, tokens, edit, compute.capacity_factor)
    if key not in _oracles:
        alone = ComputeConfig(capacity_factor=compute.capacity_factor)
        _oracles[key] = evaluate(rows, one_device_mesh(), edit=edit, compute=alone)
    expected = _oracles[key]
    mesh = make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])
    result = evaluate(rows, mesh, edit=edit, **options)
    np.testing.assert_allclose(result.loss, expected.loss, rtol=1e-5)
    difference, path = worst_difference(expected, result)
    assert difference < 2e-5, path
    for name in ("stats", "vision_stats"):
        for mine, theirs in zip(getattr(result.parts, name), getattr(expected.parts, name), strict=True):
            np.testing.assert_array_equal(mine.load, theirs.load)
            np.testing.assert_array_equal(mine.dropped, theirs.dropped)
    return result


@pytest.mark.parametrize("mesh", MESHES)
def test_mesh_equals_one_device(mesh):
    result = check(MESHES[mesh])
    assert all(s.tokens > 0 for s in (*result.parts.stats, *result.parts.vision_stats))


@pytest.mark.parametrize("name", [name for name in BATCHES if name != "mixed"])
def test_every_kind_of_batch(name):
    """On the mesh with all axes: the devices of seven rows may hold no image at all, those of others nothing else."""
    check(MESHES["data 2 x tensor 2 x expert 2"], name)


def test_zero_3():
    check(MESHES["data 2 x tensor 2 x expert 2"], rules="fsdp")


@pytest.mark.parametrize("dispatch", ["all_to_all", "replicated"])
def test_worst_skew_of_both_modalities(dispatch):
    check({"data": 2, "expert": 4}, edit=skewed, compute=ComputeConfig(dispatch=dispatch))


def test_odd_number_of_tokens():
    check(MESHES["data 2 x tensor 2 x expert 2"], tokens=27)


def test_capacity_counts_each_modality_on_its_own():
    parts = check(MESHES["expert 8"], compute=ComputeConfig(capacity_factor=0.75)).parts
    for stats in (*parts.stats, *parts.vision_stats):
        assert stats.dropped > 0
        assert stats.load.sum() + stats.dropped == stats.tokens * 3


def test_patches_that_no_device_needs_change_nothing():
    rows = multimodal_rows(CONFIG)
    one = loss_and_gradients(CONFIG, rows.batch(), one_device_mesh())
    more = loss_and_gradients(CONFIG, rows.batch(max_patches=512), one_device_mesh())
    np.testing.assert_allclose(more.loss, one.loss, rtol=1e-6)
    assert worst_difference(one, more)[0] < 1e-5
