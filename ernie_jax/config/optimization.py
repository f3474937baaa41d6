"""The optimiser of a run, and its learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ernie_jax.config.bounds import at_least
from ernie_jax.config.compute import one_of


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, clipping, averaging and what happens to non-finite steps.

    Attributes:
      b1, b2, eps, weight_decay: AdamW.
      clip_norm: global gradient norm above which gradients are scaled down; None never.
      decay_exclude: parameters whose path contains one of these have no weight decay.
      ema_decay: decay of the exponential moving average of the weights, None for no average.
      max_nonfinite: stop after this many skipped steps in a row.
      loss_scale: what the loss is first multiplied with before the backward pass, a power of two of at least 1; gradients are
        divided by it, exactly. Halved when a step is not finite, doubled after `loss_scale_growth` finite ones in a row. None,
        the default with FP8 too: scales of tiles follow the gradients, and bfloat16 has float32's range, so that a factor changes
        nothing but numbers near float32's smallest.
      loss_scale_growth: see `loss_scale`.
      gradient_compression: how gradients are summed over the data axis: `none` as they are, `int8` and `fp8` in 8 bits, `sparse`
        the largest alone; what is rounded or left out is kept for the next step. For text models, without a pipeline or ZeRO 3.
      gradient_fraction: share of a gradient's elements that `sparse` sends.
    """

    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0
    decay_exclude: tuple[str, ...] = ("bias", "norm")
    ema_decay: float | None = None
    max_nonfinite: int = 10
    loss_scale: float | None = None
    loss_scale_growth: int = 2000
    gradient_compression: str = "none"
    gradient_fraction: float = 0.3

    def __post_init__(self) -> None:
        one_of("config.optimizer", "gradient_compression", self.gradient_compression, ("none", "int8", "fp8", "sparse"))
        if not 0 < self.gradient_fraction <= 1:
            raise ValueError(
                f"config.optimizer.gradient_fraction={self.gradient_fraction}; expected a number above 0 and at most 1"
            )
        for name in ("b1", "b2", "ema_decay"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise ValueError(f"config.optimizer.{name}={value}; expected a number in [0, 1)")
        at_least("config.optimizer", 0.0, eps=self.eps, weight_decay=self.weight_decay)
        at_least("config.optimizer", 1, max_nonfinite=self.max_nonfinite, loss_scale_growth=self.loss_scale_growth)
        if self.loss_scale is not None and not (1 <= self.loss_scale <= 2.0**32 and math.frexp(self.loss_scale)[0] == 0.5):
            raise ValueError(
                f"config.optimizer.loss_scale={self.loss_scale}; expected a power of two from 1 to 2^32, so that dividing "
                "gradients by it is exact, or None for no scaling"
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"config.optimizer.clip_norm={self.clip_norm}; expected a positive norm, or None for no clipping")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate by optimiser step.

    Attributes:
      kind: `wsd` (warm-up, steady, decay), `cosine`, `constant`.
      peak, minimum: learning rates; warm-up rises from 0 to peak.
      warmup: steps of warm-up.
      steady_end: the step at which the WSD decay begins; None for 0.9 of all steps.
      tail: shape of the WSD decay, `1-sqrt` or `half_life`.
    """

    kind: str = "wsd"
    peak: float = 3e-4
    minimum: float = 3e-5
    warmup: int = 0
    steady_end: int | None = None
    tail: str = "1-sqrt"

    def __post_init__(self) -> None:
        one_of("config.schedule", "kind", self.kind, ("wsd", "cosine", "constant"))
        one_of("config.schedule", "tail", self.tail, ("1-sqrt", "half_life"))
        at_least("config.schedule", 0, warmup=self.warmup, minimum=self.minimum)
        if not self.peak > 0 or self.minimum > self.peak:
            raise ValueError(
                f"config.schedule: peak={self.peak}, minimum={self.minimum}; expected a positive peak and a minimum not above it"
            )
