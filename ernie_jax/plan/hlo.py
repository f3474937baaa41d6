"""What a compiled program communicates in one run of it: each collective as often as the loops around it make it run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ernie_jax.plan.device_groups import MeshGroups
from ernie_jax.plan.hlo_module import Computation, HloModule, Instruction
from ernie_jax.plan.hlo_trips import Frame, trip_count
from ernie_jax.testing import Collective, collectives

_PLUMBING = re.compile(r"jit\(.*\)|while|body|closed_call|eval_jaxpr|cond|branch_\d+_fun|shard_map|checkpoint|")
_WRAPPED = re.compile(r"(jvp|transpose|vmap)\((.*)\)")
_WORD = re.compile(r"[\w.\-]+")


@dataclass(frozen=True)
class CollectiveUse:
    """One collective of a program, in one run of it.

    Attributes:
      kind: all-reduce, all-gather, reduce-scatter, all-to-all, collective-permute, ragged-all-to-all.
      axis: mesh axes whose devices talk, "data", "data+expert" in the order of the mesh; "expert/inner" and "expert/outer" where
        parts of an axis do, "?" where none fits (see `MeshGroups.talking`). Of a collective-permute, the axes it crosses.
      bytes: of one device: its result (of a reduce-scatter its operand) times how often it runs. The device's own part counts;
        of a ragged-all-to-all it is the whole buffer, which is seldom full.
      count: times that it runs.
      scope: where it was written, without what loops and branches add.
      dtype: element type as HLO calls it. XLA:CPU has no collectives in bf16: there they are f32 of twice the bytes.
      devices: that talk with each other.
    """

    kind: str
    axis: str
    bytes: int
    count: float
    scope: str
    dtype: str
    devices: int


def program_collectives(
    hlo: str, mesh_shape: Mapping[str, int], *, shares: Mapping[str, float] | None = None
) -> list[CollectiveUse]:
    """What a program communicates in one run, in the order of its text.

    Loops count with their number of rounds, read from the loop or from its condition. Of a conditional the branch counts that
    communicates most, unless `shares` knows better. What is begun and ended in two places counts once. A collective of arrays
    of several element types is one use for each type. Groups of one device are left out.

    Args:
      hlo: optimised text, `compiled.as_text()`.
      mesh_shape: axis -> size of the mesh that it was compiled for.
      shares: named scope -> share of the rounds in which a branch is taken. It is that of the branch in which the scope is
        opened, not of conditionals around or inside that one; the other branches share the rest. Of several scopes within each
        other, "count_choices/stage_forward", the last is the branch's; the longest that fits a branch is taken, and of equal
        ones the largest share. A scope that is nowhere changes nothing. Shares of a pipeline are those of one stage: ask once
        for each.

    Raises:
      ValueError: a loop with collectives whose number of rounds the program does not tell; a share that is not within [0, 1],
        or shares of one conditional's branches above 1; a device that is not in the mesh; no program in the text.
    """
    shares = shares or {}
    for scope, share in shares.items():
        if not 0 <= share <= 1:
            raise ValueError(f"share {share} of scope {scope!r}; expected a number from 0 to 1")
    module, mesh = HloModule.parse(hlo), MeshGroups(mesh_shape)
    walk = _Walk(module, mesh, {tuple(scope.split("/")): share for scope, share in shares.items()})
    return [
        replace(use, bytes=round(use.bytes * times), count=float(times))
        for use, times in walk.run(Frame(module.computations[module.entry]))
    ]


def summed(uses: Iterable[CollectiveUse]) -> list[CollectiveUse]:
    """Those of equal kind, axis and dtype as one, most bytes first; the scope is that of its largest part."""
    found: dict[tuple[str, str, str], list[CollectiveUse]] = {}
    for use in uses:
        found.setdefault((use.kind, use.axis, use.dtype), []).append(use)
    totals = []
    for group in found.values():
        largest = max(group, key=lambda use: use.bytes)
        totals.append(replace(largest, bytes=sum(use.bytes for use in group), count=sum(use.count for use in group)))
    return sorted(totals, key=lambda use: -use.bytes)


Runs = list[tuple[CollectiveUse, float]]


@dataclass(frozen=True)
class _Walk:
    """Through a program as it runs; `shares` by the scopes within each other."""

    module: HloModule
    mesh: MeshGroups
    shares: Mapping[tuple[str, ...], float]

    def run(self, frame: Frame) -> Runs:
        """What a computation communicates in one run: uses with bytes of one time, and times."""
        found: Runs = []
        for each in frame.computation.of_interest:
            if not each.called:
                found += [(use, 1.0) for use in self._uses(each, frame.computation)]
            elif any(map(self.module.communicates, self.module.run_by(each))):
                if each.opcode == "while":
                    found += self._rounds(each, frame)
                elif each.opcode == "conditional":
                    found += self._branches(each, frame)
                else:
                    found += [run for name in self.module.run_by(each) for run in self.run(frame.enter(self.module, each, name))]
        return found

    def _rounds(self, loop: Instruction, frame: Frame) -> Runs:
        rounds = trip_count(self.module, loop, frame)
        body, condition = (self.run(frame.enter(self.module, loop, loop.attributes[of])) for of in ("body", "condition"))
        if rounds is None:
            kinds = sorted({use.kind for use, _ in (*body, *condition)})
            raise ValueError(
                f"loop {loop.name} ({loop.op_name or 'no scope'}) holds {', '.join(kinds)} and runs as often as its data say; "
                "expected a loop of a known number of rounds (a scan) around collectives"
            )
        return [(use, times * rounds) for use, times in body] + [(use, times * (rounds + 1)) for use, times in condition]

    def _branches(self, conditional: Instruction, frame: Frame) -> Runs:
        """Branches with a known share, and in the rest of the rounds the dearest of the others."""
        known: list[tuple[float, Runs]] = []
        others: list[Runs] = []
        for name in conditional.called:
            runs = self.run(frame.enter(self.module, conditional, name))
            share = self._share(name, conditional.op_name)
            if share is None:
                others.append(runs)
            else:
                known.append((share, runs))
        rest = 1.0 - sum(share for share, _ in known)
        if rest < -1e-9:
            raise ValueError(
                f"shares of the branches of {conditional.name} ({conditional.op_name}) come to {1 - rest:g}; expected at most 1, "
                "with a scope that only one of them opens"
            )
        known.append((max(rest, 0.0), max(others, key=_bytes, default=[])))
        return [(use, times * share) for share, runs in known if share for use, times in runs]

    def _share(self, branch: str, conditional: str) -> float | None:
        """The share of a branch of a conditional with this op_name; None where no scope of `shares` is opened in it."""
        last = {scopes[-1] for scopes in self.shares}
        lines = [line for name in self._within(branch) for line in self.module.computations[name].lines]
        fitting = set()
        for line in lines if last else ():
            if any(scope in line for scope in last):
                fitting |= {scopes for scopes in self.shares if _opened(scopes, line, conditional)}
        return max(((len(scopes), self.shares[scopes]) for scopes in fitting), default=(0, None))[1]

    def _within(self, name: str) -> set[str]:
        """A computation and those it runs, except branches of conditionals."""
        todo, found = [name], {name}
        while todo:
            for each in self.module.computations[todo.pop()].of_interest:
                new = set() if each.opcode == "conditional" else set(self.module.run_by(each)) - found
                todo += new
                found |= new
        return found

    def _uses(self, instruction: Instruction, computation: Computation) -> list[CollectiveUse]:
        """What a collective does once, for each element type."""
        if "chain_id=" in instruction.line and not any("AsyncCollectiveStart" in line for line in computation.lines):
            return []  # on TPU, written again in what it overlaps with and where it is awaited
        (found,) = collectives(instruction.line)
        axis, devices = self.mesh.sending(found.pairs) if found.kind == "collective-permute" else self.mesh.talking(found.groups)
        if devices == 1:
            return []
        kind, factor = found.kind, 1
        if kind == "reduce-scatter":
            factor = devices
        elif kind == "all-reduce" and computation.name.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"  # as XLA:TPU writes it: the slice of an all-reduce, in a fusion of this name
        sizes: dict[str, int] = {}
        for dtype, size in found.parts:
            sizes[dtype] = sizes.get(dtype, 0) + size * factor
        return [CollectiveUse(kind, axis, size, 1.0, _shortened(found), dtype, devices) for dtype, size in sizes.items()]


def _bytes(runs: Runs) -> float:
    return sum(use.bytes * times for use, times in runs)


def _opened(scopes: tuple[str, ...], line: str, conditional: str) -> bool:
    """Whether an instruction stands in these scopes, in this order, the last of them opened within the conditional."""
    found = re.search(r'op_name="([^"]*)"', line)
    if found is None or not found[1].startswith(conditional):
        return False
    inside = _WORD.findall(found[1], len(conditional))
    if scopes[-1] not in inside:
        return False
    words = iter(_WORD.findall(found[1], 0, len(conditional)) + inside[: inside.index(scopes[-1]) + 1])
    return all(scope in words for scope in scopes)


def _shortened(collective: Collective) -> str:
    """The scopes that people wrote, of several that were joined the first."""
    words = []
    for word in collective.name.partition(":")[0].split("/"):
        word = word.lstrip("(") if word.count("(") != word.count(")") else word
        while (wrapped := _WRAPPED.fullmatch(word)) is not None:
            words += ["transpose"] * (wrapped[1] == "transpose")
            word = wrapped[2]
        if not _PLUMBING.fullmatch(word):
            words.append(word)
    return "/".join(words)
