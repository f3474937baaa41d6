"""Pieces of SVG that a page shows at any width: places across are in percent, text and heights in pixels.

A drawing scaled as a whole has text too small to read on a phone. Here only what lies across the page is stretched.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape


def element(tag: str, content: str | Markup = "", **attributes: object) -> Markup:
    """An element; names of attributes have `_` for `-`, one at the end is dropped, and values and text are escaped."""
    shown = "".join(f' {name.rstrip("_").replace("_", "-")}="{escape(_short(value))}"' for name, value in attributes.items())
    return Markup(f"<{tag}{shown}>{escape(content)}</{tag}>")


def joined(parts: Iterable[Markup]) -> Markup:
    """One after another."""
    return Markup("").join(parts)


def percent(value: float) -> str:
    """A share as an attribute of a place or width."""
    return f"{_short(100 * value)}%"


def bar(start: float, width: float, *, y: float, height: float, title: str, **attributes: object) -> Markup:
    """A rectangle from `start` over `width`, shares of the drawing's width, that says `title` when pointed at."""
    return element(
        "rect", element("title", title), x=percent(start), width=percent(width), y=y, height=height, **attributes
    )  # fmt: skip


def drawing(content: Iterable[Markup], *, height: float, label: str, **attributes: object) -> Markup:
    """A whole drawing, as wide as its place; `label` says what it shows to those who do not see it."""
    space = {"xmlns": "http://www.w3.org/2000/svg", "width": "100%", "height": height}
    return element("svg", joined([element("title", label), *content]), role="img", **space, **attributes)


def _short(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value


@dataclass(frozen=True)
class Scale:
    """Values along an axis, linear or logarithmic, as shares from 0 to 1 of its length."""

    low: float
    high: float
    logarithmic: bool = False

    @classmethod
    def around(cls, values: Sequence[float], *, from_zero: bool = False) -> Scale:
        """With some room on both sides; logarithmic where values differ by more than eight times and are above 0."""
        low, high = min(values), max(values)
        if low > 0 and high / low > 8:
            room = (high / low) ** 0.06
            return cls(low / room, high * room, True)
        room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
        return cls(0.0 if from_zero else max(0.0, low - room), high + room)

    def __call__(self, value: float) -> float:
        """Where a value stands."""
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int = 6) -> list[float]:
        """Round values in it: of 1, 2 and 5 times a power of ten, at most about so many."""
        if self.logarithmic:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for heads in ((1, 2, 5), (1, 3), (1,)):
                found = [head * 10.0**power for power in powers for head in heads]
                inside = [value for value in found if self.low <= value <= self.high]
                if len(inside) <= most:
                    break
            return inside
        step = _round_step((self.high - self.low) / most)
        first = math.ceil(self.low / step - 1e-9)
        return [step * i for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _round_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(head * power for head in (1, 2, 5, 10) if head * power >= least * (1 - 1e-9))
