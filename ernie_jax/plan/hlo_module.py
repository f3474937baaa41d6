"""Optimised HLO text taken apart: computations, their instructions, and who runs whom.

Only what is asked for is parsed: a program of 50 MB is mostly fused arithmetic that nobody asks about.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property

from ernie_jax.testing import COLLECTIVES

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ?\b([a-z][a-z0-9\-]*)\(")
_CALLED = re.compile(r"\b(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_CALLED_MANY = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_ATTRIBUTE = re.compile(r"\b(condition|body|index|direction)=%?([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_NAME = re.compile(r"[\w.\-]+")
# What runs other computations as part of the program; the `to_apply` of a reduction is arithmetic on numbers.
_CALLERS = ("while", "conditional", "call", "fusion", "async-start", "custom-call")
_OF_INTEREST = re.compile(r" (?:(?:" + "|".join(COLLECTIVES) + r")(?:-start)?|" + "|".join(_CALLERS) + r")\(")


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: without the percent sign.
      opcode: `while`, `all-reduce-start`, ...
      root: whether it is what the computation returns.
      line: all of it.
    """

    name: str
    opcode: str
    root: bool
    line: str
    opened: int = field(repr=False)

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of what it is given; of a constant or parameter, what stands in the brackets."""
        depth, starts, end = 1, [self.opened], self.opened
        while depth:
            letter = self.line[end]
            depth += (letter in "([{") - (letter in ")]}")
            if letter == "," and depth == 1:
                starts.append(end + 1)
            end += 1
        texts = (self.line[a : b - 1].strip() for a, b in zip(starts, [*starts[1:], end], strict=True))
        # A type may stand before the name, a comment before both.
        return tuple(text.rpartition(" ")[2].lstrip("%") for text in texts if text)

    @cached_property
    def attributes(self) -> dict[str, str]:
        """`condition`, `body`, `index` and `direction`, where it has them."""
        return dict(_ATTRIBUTE.findall(self.line, self.opened))

    @property
    def op_name(self) -> str:
        """The scopes it was written in, outermost first, as far as the program tells."""
        found = _OP_NAME.search(self.line)
        return found[1] if found else ""

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it runs: of a loop its body, of a conditional each branch."""
        if self.opcode not in _CALLERS:
            return ()
        many = (name for names in _CALLED_MANY.findall(self.line) for name in _NAME.findall(names))
        return (*_CALLED.findall(self.line), *many)


@dataclass(frozen=True)
class Computation:
    """A named list of instructions."""

    name: str
    lines: list[str] = field(repr=False)

    @cached_property
    def instructions(self) -> dict[str, Instruction]:
        """All of them by name."""
        found = (_instruction(line) for line in self.lines)
        return {each.name: each for each in found if each is not None}

    @cached_property
    def root(self) -> Instruction:
        """What it returns."""
        return next(each for each in self.instructions.values() if each.root)

    @cached_property
    def of_interest(self) -> list[Instruction]:
        """Collectives, and what runs other computations, in the order of the text."""
        found = (_instruction(line) for line in self.lines if _OF_INTEREST.search(line))
        return [each for each in found if each is not None and (each.called or _kind(each.opcode) in COLLECTIVES)]


@dataclass(frozen=True)
class HloModule:
    """A program: its computations by name, and the name of the one that is run."""

    computations: dict[str, Computation]
    entry: str
    _communicates: dict[str, bool] = field(default_factory=dict, repr=False)

    @staticmethod
    def parse(text: str) -> HloModule:
        """Of `compiled.as_text()`.

        Raises:
          ValueError: no ENTRY computation in it.
        """
        computations: dict[str, Computation] = {}
        entry = ""
        lines: list[str] | None = None
        for line in text.splitlines():
            if line.startswith((" ", "\t")):
                if lines is not None:
                    lines.append(line)
            elif line.startswith("}"):
                lines = None
            elif not line.startswith("HloModule") and (header := _HEADER.match(line)):
                lines = []
                computations[header[2]] = Computation(header[2], lines)
                entry = header[2] if header[1] else entry
        if not entry:
            raise ValueError("no ENTRY computation in this text; expected optimised HLO, as `compiled.as_text()` gives it")
        return HloModule(computations, entry)

    def communicates(self, name: str) -> bool:
        """Whether a computation, or any that it runs, holds a collective."""
        if name not in self._communicates:
            # Ends within a recursion as well; HLO has none.
            self._communicates[name] = False
            self._communicates[name] = any(
                _kind(each.opcode) in COLLECTIVES or any(map(self.communicates, self.run_by(each)))
                for each in self.computations[name].of_interest
            )
        return self._communicates[name]

    def run_by(self, instruction: Instruction) -> list[str]:
        """Names of the computations that an instruction runs, the condition of a loop among them."""
        condition = [instruction.attributes["condition"]] if instruction.opcode == "while" else []
        return [name for name in (*instruction.called, *condition) if name in self.computations]


def _kind(opcode: str) -> str:
    return opcode.removesuffix("-start")


def _instruction(line: str) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    return None if match is None else Instruction(match[2], match[4], bool(match[1]), line, match.end())
