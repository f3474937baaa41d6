"""Image features put in the place of token embeddings. S groups of b rows, T tokens, f feature rows of a group, H width."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


@jax.custom_vjp
def place_features(x: jax.Array, features: jax.Array, feature_ids: jax.Array) -> jax.Array:
    """`x` with the rows of features where a token names one.

    The backward of the look-up is a look-up too, by the token that each feature row went to: a scatter would be slow.

    Args:
      x: [S, b, T, H].
      features: [S, f, H], of the same dtype.
      feature_ids: [S, b, T] int32, -1 keeps x; no feature row is named twice.

    Returns:
      [S, b, T, H].
    """
    looked_up = jax.vmap(lambda rows, ids: jnp.take(rows, ids, axis=0, mode="clip"))(features, feature_ids)
    return jnp.where(feature_ids[..., None] >= 0, looked_up, x)


def _forward(x: jax.Array, features: jax.Array, feature_ids: jax.Array) -> tuple[jax.Array, tuple[jax.Array, int]]:
    return place_features(x, features, feature_ids), (feature_ids, features.shape[1])


def _backward(saved: tuple[jax.Array, int], ct: jax.Array) -> tuple[jax.Array, jax.Array, np.ndarray]:
    feature_ids, count = saved
    flat_ids, flat_ct = feature_ids.reshape(len(feature_ids), -1), ct.reshape(len(ct), -1, ct.shape[-1])

    def of_group(ids: jax.Array, rows: jax.Array) -> jax.Array:
        tokens = len(ids)
        place = jnp.where(ids >= 0, ids, count)
        token = jnp.full((count,), tokens, jnp.int32).at[place].set(jnp.arange(tokens, dtype=jnp.int32), mode="drop")
        return jnp.where((token < tokens)[:, None], jnp.take(rows, token, axis=0, mode="clip"), 0)

    return (
        jnp.where(feature_ids[..., None] >= 0, 0, ct),
        jax.vmap(of_group)(flat_ids, flat_ct),
        np.zeros(feature_ids.shape, jax.dtypes.float0),
    )


place_features.defvjp(_forward, _backward)
