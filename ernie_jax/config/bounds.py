"""Bounds of numbers in a configuration."""

from __future__ import annotations


def at_least(owner: str, bound: float, /, **fields: float | None) -> None:
    """Raise ValueError for a field below `bound`; None passes."""
    for name, value in fields.items():
        if value is not None and value < bound:
            raise ValueError(f"{owner}.{name}={value}; expected at least {bound}")
