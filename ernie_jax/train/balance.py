"""Experts, devices and nodes evenly loaded during a run: figures, and moving experts. L MoE layers, E experts, G devices."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ernie_jax.config.run import RunConfig
from ernie_jax.moe.placement import check_sizes, device_loads, plan_layers
from ernie_jax.sharding import Layout
from ernie_jax.train.hooks import Hook, Moment
from ernie_jax.train.move_experts import make_move, places_of
from ernie_jax.train.placement_plot import plot_placement
from ernie_jax.train.records import Record
from ernie_jax.train.state import no_load

logger = logging.getLogger(__name__)

# Balance rates by layer in a record's `router` sections, each with its name as an average.
_RATES = {"balance": "balance_average", "device_balance": "device_balance_average", "node_balance": "node_balance_average"}
_MODALITY = {"router": "text", "vision_router": "vision"}


class BalanceHook(Hook):
    """Completes each record with the balance rates' averages over the latest `window` steps, per layer and modality.

    To be placed before the hook that writes records.

    Args:
      window: steps.
      records: those logged so far, of a run that goes on.
    """

    def __init__(self, window: int, records: Sequence[Record] = ()) -> None:
        self._window = window
        self._latest: dict[tuple[str, str], deque[list[float]]] = {}
        for record in records[-window:]:
            self._take(record)

    def at_record(self, record: Record, final: bool) -> None:
        """Take the record in, and add the averages to it."""
        for router, name in self._take(record):
            record[router][_RATES[name]] = np.mean(self._latest[router, name], axis=0).tolist()

    def _take(self, record: Record) -> list[tuple[str, str]]:
        found = [(router, name) for router in _MODALITY for name in _RATES if name in (record.get(router) or {})]
        for router, name in found:
            self._latest.setdefault((router, name), deque(maxlen=self._window)).append(record[router][name])
        return found


class PlacementHook(Hook):
    """Every `moe.placement_every` steps, moves experts between devices by their load since the last time.

    The plan is made on the host, by each process for itself from the same figures; the move is one compiled program. What it did is
    noted as `placement`: for `text` and `vision` the device balance rate of each layer `before` and `after` for the loads of the
    window, and how many experts changed places, `moved`. The latest loads before and after are drawn in `placement.png`.

    Args:
      run, layout: of the run; `check_placement` has passed.
      folder: for the picture.
    """

    blocking = True

    def __init__(self, run: RunConfig, layout: Layout, folder: Path) -> None:
        self.every = run.moe.placement_every
        self._run, self._layout, self._folder = run, layout, folder
        self._move = make_move(run, layout)

    def at_step(self, moment: Moment) -> None:
        """Plan, and move where it helps."""
        state, moe, devices = moment.state, self._run.moe, self._layout.shards("expert")
        loads, places = jax.device_get((state.expert_load, places_of(self._run, state)))
        options: dict[str, Any] = {"devices": devices, "nodes": moe.placement_nodes, "threshold": moe.placement_threshold}
        new = {name: plan_layers(load, places[name], **options).astype(np.int32) for name, load in loads.items()}
        before, after = ({name: device_loads(loads[name], table[name], devices) for name in loads} for table in (places, new))
        moved = {name: int(np.sum(places[name] != new[name])) for name in loads}
        moment.notes["placement"] = {
            _MODALITY[name]: {"before": _rates(before[name]), "after": _rates(after[name]), "moved": moved[name]} for name in loads
        }
        # Loads are counted anew for the next time, whether or not anything moves.
        if any(moved.values()):
            moment.state = self._move(state, {name: jax.device_put(table, self._layout.replicated) for name, table in new.items()})
        else:
            moment.state = replace(state, expert_load=jax.device_put(no_load(self._run), self._layout.replicated))
        jax.block_until_ready(moment.state.step)
        if any(moved.values()) and jax.process_index() == 0:
            shown = {f"{_MODALITY[name]} experts": (before[name], after[name]) for name in loads}
            plot_placement(shown, self._folder / "placement.png", title=f"Expert placement after step {moment.step}")


def check_placement(run: RunConfig, layout: Layout) -> None:
    """Refuse a placement that the mesh cannot have.

    Raises:
      ValueError: nodes that do not divide the devices of the `expert` axis.
    """
    if run.model.moe is None:
        return
    devices, nodes = layout.shards("expert"), run.moe.placement_nodes
    try:
        check_sizes(run.model.moe.num_experts, devices, nodes)
    except ValueError as error:
        raise ValueError(f"config.moe.placement_nodes={nodes}, config.mesh.expert={devices}: {error}") from None
    if run.moe.placement_every and devices == 1:
        logger.warning(
            "config.moe.placement_every=%d has nothing to move: all experts are on each device (config.mesh.expert=1)",
            run.moe.placement_every,
        )


def _rates(loads: np.ndarray) -> list[float]:
    """Mean over largest of [L, G] loads, by layer; 1 without any load."""
    largest = loads.max(-1)
    rates = np.where(largest > 0, loads.mean(-1) / np.maximum(largest, 1e-9), 1.0)
    return [round(float(rate), 4) for rate in rates]
