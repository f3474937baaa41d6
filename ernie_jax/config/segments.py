"""How a list of layer kinds becomes a few scanned segments."""

from __future__ import annotations

from dataclasses import dataclass

from ernie_jax.config.model import ModelConfig


@dataclass(frozen=True)
class Segment:
    """`repeats` copies of a unit of layers, held stacked and run by one scan.

    Attributes:
      start: global index of its first layer.
      unit: the kinds (`"dense"`, `"moe"`) of the layers of one repetition.
      repeats: how often the unit follows itself.
    """

    start: int
    unit: tuple[str, ...]
    repeats: int

    def layer_index(self, repeat: int, position: int) -> int:
        """Global index of the layer at `position` of repetition `repeat`."""
        return self.start + repeat * len(self.unit) + position


def _repeats(kinds: tuple[str, ...], start: int, size: int) -> int:
    unit, count = kinds[start : start + size], 1
    while kinds[start + count * size : start + (count + 1) * size] == unit:
        count += 1
    return count


def segments_of(config: ModelConfig) -> tuple[Segment, ...]:
    """The segments of a decoder: from each place the unit that covers most layers, the shortest of equals.

    Published models give a dense prefix and one MoE stack; an interval of 2 gives a repeated (dense, MoE) unit.
    """
    kinds = config.layer_kinds
    longest = config.moe.layer_interval if config.moe else 1
    segments: list[Segment] = []
    start = 0
    while start < len(kinds):
        choices = [(size, _repeats(kinds, start, size)) for size in range(1, min(longest, len(kinds) - start) + 1)]
        # A longer unit must repeat to be worth its larger body; a single layer always may stand alone.
        size, repeats = max((c for c in choices if c[0] == 1 or c[1] > 1), key=lambda c: (c[0] * c[1], -c[0]))
        segments.append(Segment(start, kinds[start : start + size], repeats))
        start += size * repeats
    return tuple(segments)
