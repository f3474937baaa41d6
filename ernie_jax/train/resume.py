"""Saving a run and going on from where it was: state, place in the data, configuration."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from ernie_jax.checkpoint.state import TrainCheckpointer
from ernie_jax.checkpoint.state_tree import leaves_by_path
from ernie_jax.config.run import RunConfig
from ernie_jax.data import TrainIterator
from ernie_jax.moe import RouterBias
from ernie_jax.moe.places import own_places
from ernie_jax.sharding import Layout, map_variables, variables_by_path
from ernie_jax.train.hooks import Moment
from ernie_jax.train.loss_scale import LossScale
from ernie_jax.train.state import TrainState, abstract_state

# Settings that decide which arrays the state has. What decides the data is checked by the data iterator.
_STRUCTURE = (
    "model",
    "trainable",
    "moe.freeze_gate",
    "optimizer.ema_decay",
    "moe.placement_every",
    "optimizer.gradient_compression",
)


class RunCheckpoints:
    """The checkpoints of a run in `<workdir>/checkpoints`; use as a context manager.

    Args:
      run: the run's configuration, stored with each checkpoint.
      folder: where they are.
      say: prints a line for the user.
    """

    def __init__(self, run: RunConfig, folder: Path, say: Callable[[str], None]) -> None:
        self._run, self._say = run, say
        self._folder = folder
        self._store = TrainCheckpointer(
            folder, keep=run.checkpoint.keep, keep_every=run.checkpoint.keep_every, async_save=run.checkpoint.asynchronous
        )

    def __enter__(self) -> RunCheckpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._store.close()

    def save(self, moment: Moment) -> None:
        """Save a step boundary; training goes on while the files are written."""
        extra = {"config": self._run.to_dict(), "data": _of_all_hosts(moment.batches)}
        # Of a step that is already there (a run that ended and is asked for more) the old copy is as good.
        self._store.save(moment.step, moment.state, extra)

    def check(self) -> None:
        """Raise what went wrong in a save that was under way.

        Raises:
          CheckpointWriteError: for example, no space left.
        """
        self._store.check()

    def wait(self) -> None:
        """Wait until the latest save is on disk."""
        self._store.wait()

    def latest(self) -> str:
        """Names the newest whole checkpoint, for messages."""
        step = self._store.latest_valid_step()
        return "none" if step is None else f"step {step} in {self._folder / str(step)}"

    def resume(self, layout: Layout, batches: TrainIterator) -> TrainState | None:
        """The state of the newest whole checkpoint, placed by `layout`, with `batches` set to its place; None without one.

        Raises:
          ValueError: the run's model or data are not those of the checkpoint; the message lists what changed. What it holds back
            of gradients is of a mesh with other pieces.
        """
        step = self._store.latest_valid_step()
        if step is None:
            return None
        extra = self._store.extra(step)
        changes = config_changes(extra["config"], self._run.to_dict())
        fatal = {key: change for key, change in changes.items() if _changes_structure(key, *change)}
        if fatal:
            raise ValueError(
                f"checkpoint of step {step} in {self._folder} is of another run:\n{_listed(fatal)}\n"
                "Set these back, or start afresh with another --workdir"
            )
        if changes:
            self._say(f"Configuration changed since the checkpoint:\n{_listed(changes)}")
        places = extra["data"]
        if len(places) != jax.process_count():
            raise ValueError(
                f"checkpoint of step {step} was saved by {len(places)} processes, there are {jax.process_count()} now; "
                "each has its own place in the data: resume with as many"
            )
        batches.set_state(places[jax.process_index()])
        return self._restored(step, layout, extra["config"])

    def _restored(self, step: int, layout: Layout, config: Mapping[str, Any]) -> TrainState:
        """The state of a step.

        A loss scale begins at the configured start, and experts at their own places, where the checkpoint, as all older ones, has
        none of them.
        """
        wanted = abstract_state(self._run, layout)
        if wanted.held is not None:
            _check_held(self._store.shapes(step), leaves_by_path({"held": wanted.held}), layout, f"step {step} in {self._folder}")
        had_scale = config["optimizer"].get("loss_scale") is not None
        same_scale = had_scale == (wanted.loss_scale is not None)
        unplaced = self._run.moe.placement_every and not config.get("moe", {}).get("placement_every")
        stored = _unplaced(wanted) if unplaced else wanted
        stored = stored if same_scale else replace(stored, loss_scale=None)
        state, _ = self._store.restore(step, stored, partial=had_scale and not same_scale)
        state = _placed(wanted, state) if unplaced else state
        if same_scale:
            return state
        return replace(state, loss_scale=jax.device_put(LossScale.initial(self._run.optimizer), layout.replicated))


def _check_held(saved: Mapping[str, tuple[int, ...]], wanted: Mapping[str, Any], layout: Layout, where: str) -> None:
    """Refuse what was held back by other data shards, or of other pieces of the arrays."""
    have = {path: shape for path, shape in saved.items() if path.startswith("held/")}
    want = {path: tuple(leaf.shape) for path, leaf in wanted.items()}
    path = next((path for path in sorted(have.keys() | want.keys()) if have.get(path) != want.get(path)), None)
    if path is None:
        return
    sizes = ", ".join(f"{axis}={layout.mesh.shape[axis]}" for axis in ("data", "expert", "tensor"))
    raise ValueError(
        f"checkpoint of {where} has gradients held back by another mesh than the one here ({sizes}): {path} has shape "
        f"{have.get(path)} there and {want.get(path)} here. What gradient compression holds back belongs to a data shard and its "
        "piece of an array; resume with the data, expert and tensor sizes the checkpoint was saved with"
    )


def _unplaced(abstract: TrainState) -> TrainState:
    """The state of a run that does not move experts."""
    return replace(abstract, biases=nnx.filter_state(abstract.biases, RouterBias), expert_load={})


def _placed(abstract: TrainState, state: TrainState) -> TrainState:
    """A state of such a run as one of a run that does: every expert at its own place, nothing counted yet."""
    known = variables_by_path(state.biases)

    def value(path: str, variable: nnx.Variable) -> jax.Array:
        layers, experts = variable.shape
        return (
            known[path].get_value() if path in known else jax.device_put(own_places(experts, layers), variable.get_value().sharding)
        )

    load = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), abstract.expert_load)
    return replace(state, biases=map_variables(value, abstract.biases), expert_load=load)


def config_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (saved value, value now) of every leaf that differs; None for one that is not there."""
    # Through JSON, as the saved one went: tuples become lists.
    old, new = _leaves(json.loads(json.dumps(saved))), _leaves(json.loads(json.dumps(now)))
    return {key: (old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)}


def _leaves(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in section.items():
        leaves |= _leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return leaves


def _changes_structure(key: str, old: Any, new: Any) -> bool:
    if key == "optimizer.ema_decay":
        return (old is None) != (new is None)
    if key == "moe.placement_every":
        # Experts that have been moved stay where they are: their table is needed. A number beyond the last step moves no more.
        return bool(old) and not new
    if key == "optimizer.gradient_compression":
        # Checkpoints from before there was any do not say so.
        return (old or "none") != (new or "none")
    return any(key == part or key.startswith(f"{part}.") for part in _STRUCTURE)


def _listed(changes: Mapping[str, tuple[Any, Any]]) -> str:
    return "\n".join(f"  config.{key}: {old!r} -> {new!r}" for key, (old, new) in changes.items())


def _of_all_hosts(batches: Iterator[Any]) -> list[dict[str, Any]]:
    """Every process's place in its data, in order: process 0 writes for all."""
    assert isinstance(batches, TrainIterator)
    place = batches.get_state()
    if jax.process_count() == 1:
        return [place]
    text = np.frombuffer(json.dumps(place).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(text)))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(text)] = text
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(bytes(row[:size])) for row, size in zip(rows, sizes, strict=True)]
