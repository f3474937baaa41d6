"""Which parameters a run trains: one list of patterns over their paths."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from ernie_jax.config.nearest import did_you_mean


def trained_paths(paths: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The paths that are trained, in their order.

    A pattern is a path in which `*` stands for anything, `/` included: `vision_tower/*`, `*/vision_experts/*`. One that begins
    with `!` takes away. A path is trained when a pattern names it and no `!` pattern does; a list of `!` patterns alone takes
    away from all.

    Raises:
      ValueError: a pattern that names no path, or nothing left to train.
    """
    known = list(paths)
    wanted = [pattern for pattern in patterns if not pattern.startswith("!")] or ["*"]
    unwanted = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    for pattern in (*wanted, *unwanted):
        if not any(fnmatchcase(path, pattern) for path in known):
            raise ValueError(
                f"config.trainable: {pattern!r} names no parameter{did_you_mean(pattern, known)}; the model's begin with "
                f"{', '.join(sorted({path.split('/')[0] for path in known}))}"
            )
    found = [path for path in known if _any(path, wanted) and not _any(path, unwanted)]
    if not found:
        raise ValueError(f"config.trainable={list(patterns)} leaves no parameter to train")
    return found


def _any(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)
