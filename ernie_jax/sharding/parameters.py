"""From the axes each weight carries to the sharding of a whole state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding

from ernie_jax.sharding.layout import Layout


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)


def map_variables(function: Callable[[str, nnx.Variable], Any], state: Any) -> Any:
    """`state` with the value of each variable replaced by `function(path, variable)`; paths are `/`-joined names."""

    def apply(path: tuple[Any, ...], variable: nnx.Variable) -> nnx.Variable:
        return variable.replace(function(path_name(path), variable))

    return jax.tree_util.tree_map_with_path(apply, state, is_leaf=_is_variable)


def path_name(path: tuple[Any, ...]) -> str:
    """A key path of a state as `decoder/segments/0/layers/0/attention/q_proj`."""
    return "/".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)


def variables_by_path(state: Any) -> dict[str, nnx.Variable]:
    """All variables of a state under their path."""
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_variable)
    return {path_name(path): leaf for path, leaf in leaves}


def logical_axes(variable: nnx.Variable) -> tuple[str | None, ...]:
    """The logical axes a variable was created with.

    Raises:
      ValueError: a variable without them.
    """
    axes = variable.get_metadata().get("axes")
    if axes is None:
        raise ValueError(f"variable of shape {variable.shape} carries no logical axes; create it with `parameter(...)`")
    return tuple(axes)


def state_shardings(state: Any, layout: Layout) -> Any:
    """A state of the same structure that holds a NamedSharding for each variable, for `jax.jit(out_shardings=...)`.

    Raises:
      ValueError: unknown or doubly used axes, naming the parameter.
    """

    def sharding(path: str, variable: nnx.Variable) -> NamedSharding:
        return layout.sharding(logical_axes(variable), f"parameter {path} of shape {tuple(variable.shape)}")

    return map_variables(sharding, state)
