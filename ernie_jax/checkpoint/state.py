"""Checkpoints of a training run: asynchronous, atomic, kept by policy, restored onto any mesh."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers

from ernie_jax.checkpoint.manifest import damage, write_manifest
from ernie_jax.checkpoint.state_reader import StateReader
from ernie_jax.checkpoint.state_tree import leaves_by_path, nested

logger = logging.getLogger(__name__)

State = TypeVar("State")


class CheckpointWriteError(RuntimeError):
    """A checkpoint could not be written; earlier ones are untouched."""


class TrainCheckpointer:
    """The checkpoints of one run, a folder a step.

    A step is written beside its place and moved there when all of it is on disk, together with a list of its files; older
    steps are removed only after that. With several processes, all of them make the same calls.

    Args:
      folder: local or any path `etils.epath` writes; made if need be.
      keep: how many of the latest steps to keep.
      keep_every: also keep each step that is a multiple of this.
      async_save: return from `save` as soon as the values are copied, and write while training goes on.
      read_only: never write, so that a run that is still going is not disturbed.

    Raises:
      ValueError: numbers that make no sense; a folder that is not there, with `read_only`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int = 3,
        keep_every: int | None = None,
        async_save: bool = True,
        read_only: bool = False,
    ) -> None:
        if keep < 1 or (keep_every is not None and keep_every < 1):
            raise ValueError(f"keep={keep}, keep_every={keep_every}; expected positive numbers of checkpoints and steps")
        self.folder = epath.Path(folder).resolve()
        if read_only and not self.folder.is_dir():
            raise ValueError(f"no checkpoints at {self.folder}; expected the checkpoints folder of a run")
        self._async, self._read_only = async_save, read_only
        self._saving: int | None = None
        policies = checkpoint_managers.preservation_policy
        kept: list[checkpoint_managers.PreservationPolicy] = [policies.LatestN(keep)]
        if keep_every is not None:
            kept.append(policies.EveryNSteps(keep_every))
        writing: dict[str, Any] = {
            "preservation_policy": policies.AnyPreservationPolicy(kept),
            "cleanup_tmp_directories": True,
            "async_options": ocp.options.AsyncOptions(post_finalization_callback=self._record_files),
        }
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                **({"read_only": True, "create": False, "save_interval_steps": 0} if read_only else writing)
            ),
            item_names=("state", "extra"),
            item_handlers={"state": ocp.StandardCheckpointHandler(), "extra": ocp.JsonCheckpointHandler()},
        )
        self._reader = StateReader(self._manager)

    def save(self, step: int, state: Any, extra: Mapping[str, Any], force: bool = False) -> bool:
        """Save a step.

        Args:
          step: its number.
          state: a pytree of arrays; they may be donated as soon as this returns.
          extra: what else a resumed run needs, as JSON (data position, resolved config); process 0's is stored.
          force: replace a complete checkpoint of this step; without, it stays.

        Returns:
          Whether a checkpoint is being written; False when the step is already there.

        Raises:
          ValueError: leaves that are not arrays, `extra` that is not JSON.
          CheckpointWriteError: the save before this one failed, or this one has.
        """
        if self._read_only:
            raise ValueError(f"the checkpoints at {self.folder} were opened read-only")
        tree = nested(leaves_by_path(state))
        try:
            json.dumps(extra)
        except (TypeError, ValueError) as error:
            raise ValueError(f"`extra` of step {step} is not JSON: {error}") from error
        self.wait()
        self._set_damaged_aside()
        if step in self._manager.all_steps():
            if not force:
                return False
            self._manager.delete(step)
        self._saving = step
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(state=ocp.args.StandardSave(tree), extra=ocp.args.JsonSave(dict(extra))),
                force=True,
            )
        except Exception as error:
            raise self._failed(step, error) from error
        if not self._async:
            self.wait()
        return True

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
          CheckpointWriteError: what was being written failed.
        """
        step = self._saving
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except Exception as error:
            raise self._failed(step, error) from error
        self._saving = None

    def check(self) -> None:
        """Raise the error of a save that has failed in the background, without waiting for one that is going on.

        Raises:
          CheckpointWriteError: see above.
        """
        if self._saving is not None and not self._manager.is_saving_in_progress():
            self.wait()

    def steps(self) -> tuple[int, ...]:
        """All steps that are whole, in order."""
        return tuple(step for step in sorted(self._manager.all_steps()) if self._damage(step) is None)

    def latest_valid_step(self) -> int | None:
        """The newest step that is whole, None when there is none. Newer ones that are not are logged and passed over."""
        self.wait()
        found = -1
        if jax.process_index() == 0:
            for step in sorted(self._manager.all_steps(), reverse=True):
                problem = self._damage(step)
                if problem is None:
                    found = step
                    break
                logger.warning(
                    "checkpoint of step %d at %s is %s; looking for an older one", step, self.folder / str(step), problem
                )
        if jax.process_count() > 1:
            found = int(multihost_utils.broadcast_one_to_all(np.int32(found)))
        return None if found < 0 else found

    def restore(self, step: int, abstract: State, *, cast: bool = False, partial: bool = False) -> tuple[State, dict[str, Any]]:
        """A saved state in the structure, formats and shardings of `abstract`.

        Args:
          step: one that is there.
          abstract: a pytree like the one saved, of arrays or ShapeDtypeStructs; leaves without a sharding become numpy arrays.
          partial: read only the leaves of `abstract`; without, others in the checkpoint are an error.
          cast: let a floating-point leaf change to the floating-point format of `abstract`.

        Returns:
          (state, extra).

        Raises:
          ValueError: no such step, damaged files, or leaves that are missing, extra, of another shape or format; all are listed.
        """
        return self._reader.restore(step, abstract, cast, partial)

    def restore_numpy(self, step: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """A saved state as host arrays by `/`-joined path, whatever it was saved from, and its extra.

        Raises:
          ValueError: no such step, damaged files.
        """
        return self._reader.restore_numpy(step)

    def extra(self, step: int) -> dict[str, Any]:
        """The extra of a step alone.

        Raises:
          ValueError: no such step, damaged files.
        """
        return self._reader.extra(step)

    def shapes(self, step: int) -> dict[str, tuple[int, ...]]:
        """The shapes of a saved state by `/`-joined path.

        Raises:
          ValueError: no such step, damaged files.
        """
        return self._reader.shapes(step)

    def close(self) -> None:
        """Wait for what is being written and free the threads.

        Raises:
          CheckpointWriteError: as `wait`.
        """
        try:
            self.wait()
        finally:
            self._manager.close()

    def __enter__(self) -> TrainCheckpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _record_files(self) -> None:
        """Called by orbax when every file of a step is written, just before the step is committed."""
        if jax.process_index() != 0:
            return
        assert self._saving is not None
        name = str(self._saving)
        # Where a folder cannot be renamed atomically (object stores) orbax writes in place and commits by a marker file.
        places = [
            path for path in self.folder.iterdir() if path.name == name or path.name.startswith(f"{name}.orbax-checkpoint-tmp")
        ]
        for place in places:
            write_manifest(place)

    def _damage(self, step: int) -> str | None:
        folder = self.folder / str(step)
        return damage(folder) if folder.is_dir() else "missing"

    def _set_damaged_aside(self) -> None:
        """Rename what is not whole, so that its number is free and it does not count among the steps to keep."""
        if jax.process_index() == 0:
            for step in self._manager.all_steps():
                problem = self._damage(step)
                if problem is not None:
                    self._rename_aside(step, problem)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("ernie_jax damaged checkpoints set aside")
        self._manager.reload()

    def _rename_aside(self, step: int, problem: str) -> None:
        source = self.folder / str(step)
        if not source.is_dir():
            return
        number = next(n for n in range(1000) if not (self.folder / f"{step}.damaged-{n}").exists())
        aside = self.folder / f"{step}.damaged-{number}"
        source.rename(aside)
        logger.warning("checkpoint of step %d is %s; set aside as %s", step, problem, aside)

    def _failed(self, step: int | None, error: Exception) -> CheckpointWriteError:
        self._saving = None
        # orbax has already struck off its list what the new step would have replaced; on disk it is still there.
        self._manager.reload()
        whole = self.steps()
        older = f"the newest whole one is step {whole[-1]}" if whole else "there is no older one"
        return CheckpointWriteError(f"checkpoint of step {step} at {self.folder} could not be written ({error}); {older}")
