"""AdamW over the trained parameters by path, and the post-step form of router orthogonality. E experts, D model.

The optimiser works on a flat dictionary `path -> array` of the parameters that are trained: a frozen parameter has no entry,
hence no gradient, no update and no moments. The router's correction bias is not a parameter and never appears here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

from ernie_jax.config.optimization import OptimizerConfig
from ernie_jax.moe import orthogonal_loss
from ernie_jax.native import adamw_step, missing

Arrays = dict[str, jax.Array]


def is_gate(path: str) -> bool:
    """Whether a parameter is a router's gate, of the text or of the vision experts."""
    return path.endswith("router/gate")


def decay_mask(paths: Sequence[str], excluded: Sequence[str]) -> dict[str, bool]:
    """For each parameter path, whether weight decay applies: not where it contains one of `excluded`."""
    return {path: not any(part in path for part in excluded) for path in paths}


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov and Hutter 2019), clipping included, in three passes over memory a parameter; by a native kernel in one.

    Each of the two moments and the parameter is one elementwise expression of buffers that may be reused for it, with the choice
    of a skipped step inside. A chain of transformations leaves XLA:CPU to copy both moments first, and takes three times as long.

    Attributes:
      config: of the optimiser.
      decays: for each parameter path, whether weight decay applies.
      alone: whether one device holds all of every parameter, so that a native kernel can take it where there is one.
    """

    config: OptimizerConfig
    decays: Mapping[str, bool]
    alone: bool = False

    def init(self, values: Arrays) -> optax.ScaleByAdamState:
        """Moments of zero, float32, at step 0."""
        first, second = (jax.tree.map(jnp.zeros_like, values) for _ in range(2))
        return optax.ScaleByAdamState(count=jnp.zeros((), jnp.int32), mu=first, nu=second)

    def update(
        self, grads: Arrays, state: optax.ScaleByAdamState, values: Arrays, rate: jax.Array, finite: jax.Array | bool = True
    ) -> tuple[Arrays, optax.ScaleByAdamState]:
        """(new values, new state); where not `finite`, exactly the old ones.

        The norm that clips is taken over all parameters at once, as one global array each: a shard, a replica or a parameter
        group has no norm of its own.

        Args:
          grads, values: by path.
          state: moments of the same paths.
          rate: learning rate.
          finite: whether the step counts.
        """
        config, count = self.config, state.count + 1
        norm = optax.tree.norm(grads)
        scale = 1.0 if config.clip_norm is None else config.clip_norm / jnp.maximum(norm, config.clip_norm)
        unbias_first, unbias_second = (1.0 / (1.0 - b ** count.astype(jnp.float32)) for b in (config.b1, config.b2))
        new: Arrays = {}
        first: Arrays = {}
        second: Arrays = {}
        for path, value in values.items():
            if self._has_kernel(value, grads[path]):
                new[path], first[path], second[path] = adamw_step(
                    grads[path],
                    value,
                    (state.mu[path], state.nu[path]),
                    scale=scale,
                    unbias=(unbias_first, unbias_second),
                    rate=rate,
                    finite=finite,
                    betas=(config.b1, config.b2),
                    eps=config.eps,
                    decay=config.weight_decay if self.decays[path] else 0.0,
                )
                continue
            grad, m, v = grads[path] * scale, state.mu[path], state.nu[path]
            m = jnp.where(finite, config.b1 * m + (1.0 - config.b1) * grad, m)
            v = jnp.where(finite, config.b2 * v + (1.0 - config.b2) * jnp.square(grad), v)
            step = m * unbias_first / (jnp.sqrt(v * unbias_second) + config.eps)
            if self.decays[path]:
                step += config.weight_decay * value
            new[path], first[path], second[path] = jnp.where(finite, value - rate * step, value), m, v
        return new, optax.ScaleByAdamState(count=jnp.where(finite, count, state.count), mu=first, nu=second)

    def _has_kernel(self, *arrays: jax.Array) -> bool:
        return self.alone and all(a.dtype == jnp.float32 for a in arrays) and missing() is None


def make_adamw(config: OptimizerConfig, paths: Sequence[str], *, alone: bool = False) -> AdamW:
    """The optimiser of the parameters of these paths; `alone` as of `AdamW`."""
    return AdamW(config, decay_mask(paths, config.decay_exclude), alone)


def orthogonal_step(values: Arrays, rate: jax.Array | float, num_groups: int) -> Arrays:
    """`Wg <- Wg - rate * dL_orth/dWg` for every trained gate [..., E, D]; not scaled by the learning rate or by Adam.

    As in the loss, `num_groups` is for the text gates: those of the vision experts compare all rows.
    """
    stepped = dict(values)
    for path, gate in values.items():
        if is_gate(path):
            groups = 1 if path.endswith("vision_router/gate") else num_groups
            stepped[path] = gate - rate * jax.grad(lambda w, groups=groups: orthogonal_loss(w, groups).sum())(gate)
    return stepped
