"""Says, once a process, that FP8 products are emulated."""

from __future__ import annotations

import functools
import logging

import jax

_log = logging.getLogger(__name__)


def announce_emulation() -> None:
    """Log that this backend gets the arithmetic of FP8 products and not their speed; once, however often it is called."""
    _announce(jax.default_backend())


@functools.cache
def _announce(platform: str) -> None:
    _log.warning(
        "FP8 products are emulated on %s: operands are quantised to FP8, then multiplied in float32. Results and saved bytes are "
        "those of FP8, the speed is not",
        platform,
    )
