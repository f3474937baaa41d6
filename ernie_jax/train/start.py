"""The state a run begins with: random weights, or those of a checkpoint, such as the export of the stage before."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx

from ernie_jax.checkpoint import load_pretrained
from ernie_jax.checkpoint.extra_tensors import is_mtp
from ernie_jax.checkpoint.weight_files import WeightFiles
from ernie_jax.config.run import RunConfig
from ernie_jax.sharding import Layout
from ernie_jax.train.state import TrainState, init_state, new_state, state_shardings


def starting_state(run: RunConfig, layout: Layout) -> TrainState:
    """The state of step 0, each array on the devices that hold it.

    Raises:
      ValueError: `init_from` is no checkpoint, or one of another shape than the run's model; all differences are listed. It
        has no weights of multi-token prediction, and the run trains them.
    """
    if run.init_from is None:
        return init_state(run, layout)
    if run.mtp_blocks:
        _check_mtp(run.init_from)
    where: Any = {"mesh": layout.mesh, "rules": layout.rules, "movable_experts": run.compute.movable_experts}
    model = load_pretrained(run.init_from, mtp="load" if run.mtp_blocks else "drop", **where)
    found, wanted = (_shape(config, mtp=run.mtp_blocks > 0) for config in (model.config, run.model))
    differences = [f"{key} is {found[key]!r} there and {wanted[key]!r} here" for key in wanted if found[key] != wanted[key]]
    if differences:
        raise ValueError(f"config.init_from={run.init_from!r} is not of this run's model: {'; '.join(differences)}")
    states: Any = nnx.split(model, nnx.Param, ...)
    # Compiled for the sake of the shardings: moments may lie on other devices than their weights.
    create = jax.jit(
        lambda p, b: new_state(run, p, b, layout),
        out_shardings=state_shardings(run, layout),
        donate_argnums=(0, 1),
    )
    state: TrainState = create(states[1], states[2])
    return state


def _check_mtp(folder: str) -> None:
    with WeightFiles(folder) as files:
        if not any(is_mtp(name) for name in files.entries):
            raise ValueError(
                f"config.init_from={folder!r} has no weights of multi-token prediction, and the run trains its blocks; set "
                "config.loss.mtp_weight to 0, or start from a checkpoint that has them"
            )


def _shape(config: object, *, mtp: bool) -> dict[str, object]:
    """What decides the weights, by name."""
    fields = dataclasses.asdict(config)  # type: ignore[call-overload]
    # How weights would have been drawn, how far they may be used, and blocks of multi-token prediction if none are trained.
    for name in ("initializer_range", "max_position_embeddings", *(() if mtp else ("num_nextn_predict_layers",))):
        fields.pop(name)
    if fields["vision"] is not None:
        fields["vision"].pop("initializer_range")
    return dict(fields)
