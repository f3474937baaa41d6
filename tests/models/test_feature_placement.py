"""Features in the place of embeddings, and what every device of the mesh computes and communicates for them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ernie_jax.models import init_model, inputs_of
from ernie_jax.models.feature_placement import place_features
from ernie_jax.sharding import make_layout, make_mesh
from ernie_jax.testing import count_collectives, multimodal_rows, tiny_vl

CONFIG = tiny_vl()


def test_values_and_gradients_equal_a_plain_look_up():
    rng = np.random.default_rng(0)
    x, features, ct = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, 3, 5, 4), (2, 7, 4), (2, 3, 5, 4)))
    ids = np.full((2, 15), -1)
    # Of the second group no row is used but one; row 6 of the first is used by the last token.
    ids[0, [1, 2, 9, 14]], ids[1, 0] = [3, 0, 5, 6], 2
    ids = jnp.asarray(ids.reshape(2, 3, 5))

    def plain(x, features):
        rows = jnp.stack([features[g][jnp.maximum(ids[g], 0)] for g in range(2)])
        return jnp.where(ids[..., None] >= 0, rows, x)

    out, pullback = jax.vjp(lambda x, f: place_features(x, f, ids), x, features)
    expected, expected_pullback = jax.vjp(plain, x, features)
    np.testing.assert_array_equal(out, expected)
    for mine, theirs in zip(pullback(ct), expected_pullback(ct), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)


@pytest.mark.parametrize("sizes", [{"data": 8}, {"data": 2, "tensor": 2, "expert": 2}], ids=str)
def test_the_tower_communicates_nothing_and_its_gradient_is_summed_once(sizes):
    """Tensor axis included: no weight of it is split, no feature leaves the device that made it."""
    layout = make_layout(make_mesh(**sizes), CONFIG)
    model = init_model(CONFIG, layout=layout)
    shards, ranks = layout.shards("batch"), layout.shards("image_devices")
    vision = inputs_of(jax.tree.map(jnp.asarray, multimodal_rows(CONFIG).batch(shards, ranks))).vision
    graphdef, state = nnx.split(model)

    def rows(state):
        return nnx.merge(graphdef, state).vision_rows(vision)

    assert count_collectives(jax.jit(rows).lower(state).compile().as_text()) == {}
    parts = nnx.split((model.vision_tower, model.resampler))[1]
    gradient = jax.jit(jax.grad(lambda s: jnp.sum(rows(s) ** 2), allow_int=True)).lower(state).compile().as_text()
    found = count_collectives(gradient)
    assert set(found) == {"all-reduce"} and found["all-reduce"] <= len(jax.tree.leaves(parts))
