"""How often a loop of a compiled program runs, where the program tells.

Some backends write it behind the loop (`known_trip_count`); for others the condition is read: a number of the loop's state
compared with one that stays, of which the first value and the step are known.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ernie_jax.plan.hlo_module import Computation, HloModule, Instruction

_KNOWN = re.compile(r'known_trip_count"?[:=]\s*\{"?n"?:\s*"?([0-9]+)')
_PASSED_ON = ("bitcast", "convert", "copy", "optimization-barrier", "reshape", "copy-done", "copy-start")
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}


@dataclass(frozen=True)
class Frame:
    """A computation that is being run: who runs it, and within what."""

    computation: Computation
    caller: Instruction | None = None
    outer: Frame | None = None

    def enter(self, module: HloModule, caller: Instruction, name: str) -> Frame:
        """The frame of computation `name` that instruction `caller` of this frame runs."""
        return Frame(module.computations[name], caller, self)


@dataclass(frozen=True)
class _Number:
    """`offset`, plus an element of the state of the loop that is being looked at where `element` is not None."""

    offset: int
    element: int | None = None


def trip_count(module: HloModule, loop: Instruction, frame: Frame) -> int | None:
    """Rounds of a loop, None where they depend on what the program computes.

    Args:
      loop: the `while`.
      frame: that it stands in.
    """
    if known := _KNOWN.search(loop.line):
        return int(known[1])
    condition = module.computations[loop.attributes["condition"]]
    reader = _Reader(module, _state_of(condition), loop)
    found = reader.comparison(condition.root.name, Frame(condition, loop, frame))
    if found is None:
        return None
    left, right, direction = found
    if left.element is None:
        left, right, direction = right, left, _MIRRORED.get(direction, "")
    if left.element is None:
        return None
    outside = _Reader(module)
    body = module.computations[loop.attributes["body"]]
    first = outside.element(loop.operands[0], left.element, frame)
    step = outside.step(loop, left.element, frame)
    bound = _Number(right.offset)
    if right.element is not None:
        if _Reader(module, _state_of(body), loop).element(body.root.name, right.element, Frame(body, loop, frame)) != _Number(
            0, right.element
        ):
            return None
        start = outside.element(loop.operands[0], right.element, frame)
        if start is None:
            return None
        bound = _Number(start.offset + right.offset)
    if first is None or step is None:
        return None
    return _rounds(first.offset + left.offset, bound.offset, step, direction)


def _rounds(first: int, bound: int, step: int, direction: str) -> int | None:
    """Values first, first + step, ... that compare so with the bound before one does not."""
    distance = bound - first
    if direction in ("GT", "GE"):
        distance, step, direction = -distance, -step, {"GT": "LT", "GE": "LE"}[direction]
    if direction == "NE":
        return distance // step if step and distance % step == 0 and distance // step >= 0 else None
    if direction not in ("LT", "LE") or step <= 0:
        return None
    return max(0, -(-distance // step)) if direction == "LT" else max(0, distance // step + 1)


def _state_of(computation: Computation) -> str:
    """Name of the only parameter of a loop's body or condition."""
    return next(each.name for each in computation.instructions.values() if each.opcode == "parameter")


@dataclass(frozen=True)
class _Reader:
    """Follows numbers through a program.

    Attributes:
      module: the program.
      state: name of the parameter whose elements are left open; empty to have them followed out of the loop.
      loop: whose body or condition has that parameter.
    """

    module: HloModule
    state: str = ""
    loop: Instruction | None = None

    def comparison(self, name: str, frame: Frame) -> tuple[_Number, _Number, str] | None:
        """Both sides and the direction of what `name` compares."""
        each = frame.computation.instructions.get(name)
        if each is None:
            return None
        if each.opcode in ("fusion", "call"):
            inner = frame.enter(self.module, each, each.called[0])
            return self.comparison(inner.computation.root.name, inner)
        if each.opcode in _PASSED_ON:
            return self.comparison(each.operands[0], frame)
        if each.opcode != "compare":
            return None
        left, right = (self.number(operand, frame) for operand in each.operands)
        return None if left is None or right is None else (left, right, each.attributes.get("direction", ""))

    def number(self, name: str, frame: Frame) -> _Number | None:
        """The value of a scalar instruction, None where it is not known."""
        each = frame.computation.instructions.get(name)
        if each is None:
            return None
        if each.opcode == "constant":
            value = each.operands[0] if each.operands else ""
            return _Number(int(value)) if re.fullmatch(r"-?[0-9]+", value) else None
        if each.opcode in _PASSED_ON:
            return self.number(each.operands[0], frame)
        if each.opcode in ("add", "subtract"):
            left, right = (self.number(operand, frame) for operand in each.operands)
            if left is None or right is None:
                return None
            if right.element is None:
                return _Number(left.offset + (right.offset if each.opcode == "add" else -right.offset), left.element)
            return _Number(left.offset + right.offset, right.element) if left.element is None and each.opcode == "add" else None
        if each.opcode == "get-tuple-element":
            return self.element(each.operands[0], int(each.attributes["index"]), frame)
        if each.opcode in ("fusion", "call"):
            inner = frame.enter(self.module, each, each.called[0])
            return self.number(inner.computation.root.name, inner)
        if each.opcode == "parameter" and frame.caller is not None and frame.outer is not None:
            return self.number(_argument(each, frame.caller), frame.outer) if frame.caller.opcode in ("fusion", "call") else None
        return None

    def element(self, name: str, index: int, frame: Frame) -> _Number | None:
        """The value of element `index` of the tuple `name`."""
        each = frame.computation.instructions.get(name)
        if each is None:
            return None
        if each.opcode == "tuple":
            return self.number(each.operands[index], frame)
        if each.opcode in _PASSED_ON:
            return self.element(each.operands[0], index, frame)
        if each.opcode in ("fusion", "call"):
            inner = frame.enter(self.module, each, each.called[0])
            return self.element(inner.computation.root.name, index, inner)
        if each.opcode == "while":
            return self.element(each.operands[0], index, frame) if self.step(each, index, frame) == 0 else None
        if each.opcode != "parameter" or frame.caller is None or frame.outer is None:
            return None
        if name == self.state and frame.caller is self.loop:
            return _Number(0, index)
        if frame.caller.opcode == "while" and self.step(frame.caller, index, frame.outer) != 0:
            return None
        if frame.caller.opcode == "conditional":
            branch = frame.caller.called.index(frame.computation.name)
            return self.element(frame.caller.operands[1 + branch], index, frame.outer)
        return self.element(_argument(each, frame.caller), index, frame.outer)

    def step(self, loop: Instruction, index: int, frame: Frame) -> int | None:
        """By how much element `index` of a loop's state grows in a round; None where that is not known."""
        body = self.module.computations[loop.attributes["body"]]
        found = _Reader(self.module, _state_of(body), loop).element(body.root.name, index, Frame(body, loop, frame))
        return found.offset if found is not None and found.element == index else None


def _argument(parameter: Instruction, caller: Instruction) -> str:
    """What the instruction that runs a computation gives it as one of its parameters."""
    return caller.operands[0 if caller.opcode == "while" else int(parameter.operands[0])]
