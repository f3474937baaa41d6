"""Any pytree of arrays as a plain nested dict and back: what is on disk depends on no class of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from ernie_jax.sharding import path_name


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """The arrays of a tree (those inside nnx variables too) under `/`-joined paths.

    Raises:
      ValueError: two leaves with one path, or a typed random key.
    """
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_variable):
        name = path_name(path)
        value = leaf.get_value() if _is_variable(leaf) else leaf
        if name in leaves:
            raise ValueError(f"two leaves of the state are both called {name}; rename one")
        if isinstance(value, bool | int | float | complex | np.generic):
            value = np.asarray(value)
        if not (hasattr(value, "shape") and hasattr(value, "dtype")):
            raise ValueError(
                f"leaf {name} of the state is a {type(value).__name__}; expected an array (put other values into `extra`)"
            )
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            raise ValueError(f"leaf {name} of the state is a typed random key; store jax.random.key_data of it")
        leaves[name] = value
    return leaves


def with_leaves(tree: Any, leaves: Mapping[str, Any]) -> Any:
    """A tree of the same structure with the given arrays at its paths."""

    def place(path: tuple[Any, ...], leaf: Any) -> Any:
        value = leaves[path_name(path)]
        return leaf.replace(value) if _is_variable(leaf) else value

    return jax.tree_util.tree_map_with_path(place, tree, is_leaf=_is_variable)


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """`/`-joined paths as a nested dict."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def unnested(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The inverse of `nested`."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        leaves |= unnested(value, f"{path}/") if isinstance(value, Mapping) else {path: value}
    return leaves


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)
