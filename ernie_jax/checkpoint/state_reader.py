"""Reading a saved training state: compared with what is wanted leaf by leaf before anything is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from ernie_jax.checkpoint.manifest import damage
from ernie_jax.checkpoint.state_tree import leaves_by_path, nested, unnested, with_leaves
from ernie_jax.config.nearest import did_you_mean

State = TypeVar("State")
T = TypeVar("T")


class StateReader:
    """The steps of an orbax manager as states; see `TrainCheckpointer` for the calls."""

    def __init__(self, manager: ocp.CheckpointManager) -> None:
        self._manager = manager

    def restore(self, step: int, abstract: State, cast: bool, partial: bool) -> tuple[State, dict[str, Any]]:
        """`TrainCheckpointer.restore`."""
        wanted, saved = leaves_by_path(abstract), self._saved(step)
        problems = _mismatches({path: leaf for path, leaf in saved.items() if not partial or path in wanted}, wanted, cast)
        if problems:
            where = self._manager.directory / str(step)
            raise ValueError(f"checkpoint {where} does not fit the state that is asked for:\n" + "\n".join(problems))
        leaves, extra = self._read(step, wanted)
        return with_leaves(abstract, leaves), extra

    def restore_numpy(self, step: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """`TrainCheckpointer.restore_numpy`."""
        shapes = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in self._saved(step).items()}
        return self._read(step, shapes)

    def extra(self, step: int) -> dict[str, Any]:
        """`TrainCheckpointer.extra`."""
        args = ocp.args.Composite(extra=ocp.args.JsonRestore())
        return dict(self._guarded(step, lambda: self._manager.restore(step, args=args))["extra"])

    def shapes(self, step: int) -> dict[str, tuple[int, ...]]:
        """`TrainCheckpointer.shapes`."""
        return {path: tuple(leaf.shape) for path, leaf in self._saved(step).items()}

    def _saved(self, step: int) -> dict[str, Any]:
        """Shape and format of each saved leaf."""
        metadata = self._guarded(step, lambda: self._manager.item_metadata(step))["state"]
        return unnested(metadata.tree)

    def _read(self, step: int, wanted: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The leaves that are wanted, of those that are there."""
        targets = nested({path: _target(leaf) for path, leaf in wanted.items()})
        args = ocp.args.PyTreeRestore(
            item=targets, restore_args=ocp.checkpoint_utils.construct_restore_args(targets), partial_restore=True
        )

        def read() -> Any:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
                return reader.restore(self._manager.directory / str(step) / "state", args=args)

        return unnested(self._guarded(step, read)), self.extra(step)

    def _guarded(self, step: int, read: Callable[[], T]) -> T:
        where = self._manager.directory / str(step)
        if step not in self._manager.all_steps():
            raise ValueError(
                f"no checkpoint of step {step} at {self._manager.directory}; there are {sorted(self._manager.all_steps())}"
            )
        problem = damage(where)
        if problem is not None:
            raise ValueError(f"checkpoint {where} cannot be read: it is {problem}")
        try:
            return read()
        except Exception as error:
            # orbax and its storage raise whatever the layer that noticed raises.
            raise ValueError(f"checkpoint {where} cannot be read: {error}") from error


def _target(leaf: Any) -> Any:
    """What orbax is asked for: an array with this very sharding (it would take the saved one otherwise), or a host array."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return np.empty(leaf.shape, leaf.dtype)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _mismatches(saved: Mapping[str, Any], wanted: Mapping[str, Any], cast: bool) -> list[str]:
    lines = [f"  missing in the checkpoint: {path}{did_you_mean(path, saved)}" for path in wanted if path not in saved]
    lines += [f"  only in the checkpoint: {path}{did_you_mean(path, wanted)}" for path in saved if path not in wanted]
    for path in (path for path in wanted if path in saved):
        have, want = saved[path], wanted[path]
        if tuple(have.shape) != tuple(want.shape):
            lines.append(f"  wrong shape: {path} was saved as {tuple(have.shape)}, asked for as {tuple(want.shape)}")
        elif jnp.dtype(have.dtype) != jnp.dtype(want.dtype):
            floats = jnp.issubdtype(have.dtype, jnp.floating) and jnp.issubdtype(want.dtype, jnp.floating)
            if not (cast and floats):
                hint = "; pass cast=True to convert" if floats else ""
                lines.append(
                    f"  wrong format: {path} was saved as {jnp.dtype(have.dtype)}, asked for as {jnp.dtype(want.dtype)}{hint}"
                )
    return lines
