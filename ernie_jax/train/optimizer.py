"""AdamW over the trained parameters by path, and the post-step form of router orthogonality. E experts, D model.

The optimiser works on a flat dictionary `path -> array` of the parameters that are trained: a frozen parameter has no entry,
hence no gradient, no update and no moments. The router's correction bias is not a parameter and never appears here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import optax

from ernie_jax.config.run import OptimizerConfig
from ernie_jax.moe import orthogonal_loss

Arrays = dict[str, jax.Array]


def is_gate(path: str) -> bool:
    """Whether a parameter is a router's gate, of the text or of the vision experts."""
    return path.endswith("router/gate")


def decay_mask(paths: Sequence[str], excluded: Sequence[str]) -> dict[str, bool]:
    """For each parameter path, whether weight decay applies: not where it contains one of `excluded`."""
    return {path: not any(part in path for part in excluded) for path in paths}


def make_adamw(config: OptimizerConfig, paths: Sequence[str]) -> optax.GradientTransformation:
    """AdamW for the parameters of these paths, for a learning rate of 1 (the step multiplies by the schedule's).

    The norm that clips is taken over all trained parameters at once, as one global array each: a shard, a replica or a
    parameter group has no norm of its own.

    Args:
      config: of the optimiser.
      paths: the trained parameters.
    """
    return optax.chain(
        optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm),
        optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask(paths, config.decay_exclude)),
        optax.scale(-1.0),
    )


def adam_updates(
    transform: optax.GradientTransformation, grads: Arrays, opt_state: Any, values: Arrays, rate: jax.Array
) -> tuple[Arrays, Any]:
    """(new values, new optimiser state) after one update at learning rate `rate`."""
    updates, opt_state = transform.update(grads, opt_state, values)
    return {path: value + rate * updates[path] for path, value in values.items()}, opt_state


def orthogonal_step(values: Arrays, rate: float, num_groups: int) -> Arrays:
    """`Wg <- Wg - rate * dL_orth/dWg` for every trained gate [..., E, D]; not scaled by the learning rate or by Adam."""
    stepped = dict(values)
    for path, gate in values.items():
        if is_gate(path):
            stepped[path] = gate - rate * jax.grad(lambda w: orthogonal_loss(w, num_groups).sum())(gate)
    return stepped
