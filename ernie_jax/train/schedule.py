"""The learning rate as a function of the optimiser step. t step, W warm-up, S end of the steady part, T total, m = minimum / peak.

    t < W : t / W                            (every schedule; the minimum plays no part)
    wsd   : 1 until S, then r (1 - m) + m    with p = (t - S) / (T - S)
              1-sqrt     r = 1 - sqrt(p)
              half_life  r = (0.05^p - 0.05) / 0.95
    cosine: r (1 - m) + m                    with r = (1 + cos(pi (t - W) / (T - W))) / 2

Formulas of the published recipes (`wsd_lr`). A step is one optimiser step, never a microbatch, and the rate depends on its
number alone, so a resumed run goes on exactly where it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ernie_jax.config.run import ScheduleConfig

# What is left of an exponential decay at its end, before it is stretched to reach zero.
_HALF_LIFE_REST = 0.05

TAILS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "1-sqrt": lambda p: 1.0 - jnp.sqrt(p),
    "half_life": lambda p: (jnp.power(_HALF_LIFE_REST, p) - _HALF_LIFE_REST) / (1.0 - _HALF_LIFE_REST),
}


@dataclass(frozen=True)
class Schedule:
    """The learning rate of a run: calling it with a step gives the rate.

    Attributes:
      config: kind, peak, minimum, warm-up, and where and how the decay begins.
      total: T, steps of the whole run.
    """

    config: ScheduleConfig
    total: int

    @property
    def steady_end(self) -> int:
        """S, the last step at the peak; beyond T the decay never begins."""
        return max(self.config.warmup, self.total * 9 // 10) if self.config.steady_end is None else self.config.steady_end

    def __call__(self, step: jax.Array | int) -> jax.Array:
        """The learning rate (float32 scalar) of the update that follows `step` finished ones."""
        t = jnp.asarray(step, jnp.float32)
        c = self.config
        rest, floor = KINDS[c.kind](self, t), c.minimum / c.peak
        after = c.peak * (rest * (1.0 - floor) + floor)
        return jnp.where(t < c.warmup, c.peak * t / max(1, c.warmup), after).astype(jnp.float32)


def _progress(t: jax.Array, start: int, end: int) -> jax.Array:
    # A decay of no steps (start = end) is one that has not begun until `end`, instead of 0 / 0.
    return jnp.clip((t - start) / max(1, end - start), 0.0, 1.0)


KINDS: dict[str, Callable[[Schedule, jax.Array], jax.Array]] = {
    "wsd": lambda s, t: TAILS[s.config.tail](_progress(t, s.steady_end, s.total)),
    "cosine": lambda s, t: 0.5 * (1.0 + jnp.cos(jnp.pi * _progress(t, s.config.warmup, s.total))),
    "constant": lambda s, t: jnp.ones_like(t),
}
