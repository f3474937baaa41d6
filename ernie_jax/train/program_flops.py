"""FLOPs of the matrix products in a traced program, loop bodies as often as they run, on all devices together.

The compiler's own count sees the body of a loop once. Here the program is read, not run, so it may be of any size. What no result
needs is left out, as the compiler leaves it out. Three things are not in the program and are taken as follows: a grouped
product (`ragged_dot`) computes `ragged_share` of its rows; a loop whose rounds depend on data, inside a scan of L, runs (L + 1) / 2
times, which is what the tiles of causal attention come to; of the branches of a `cond` the dearest counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var


def program_flops(function: Callable[..., Any], *args: Any, ragged_share: float = 1.0) -> float:
    """2 m n k for every product of [m, k] and [k, n] that the function needs for its results.

    Args:
      function: anything that JAX traces; compiled functions too.
      *args: arrays or ShapeDtypeStructs.
      ragged_share: rows that a grouped product really has, as a share of its buffer.
    """
    program = jax.make_jaxpr(function)(*args)
    return _Counter(ragged_share).count(program.jaxpr, [True] * len(program.jaxpr.outvars), 1)[0]


class _Counter:
    def __init__(self, ragged_share: float) -> None:
        self._ragged_share = ragged_share

    def count(self, jaxpr: Jaxpr, wanted: Sequence[bool], length: int) -> tuple[float, list[bool]]:
        """(FLOPs for these results, which inputs they need); `length` is that of the scan around."""
        needed: set[Var] = {v for v, want in zip(jaxpr.outvars, wanted, strict=True) if want and not isinstance(v, Literal)}
        total = 0.0
        for equation in reversed(jaxpr.eqns):
            out = [v in needed for v in equation.outvars]
            if any(out):
                flops, uses = self._equation(equation, out, length)
                total += flops
                needed.update(v for v, use in zip(equation.invars, uses, strict=True) if use and not isinstance(v, Literal))
        return total, [v in needed for v in jaxpr.invars]

    def _equation(self, equation: JaxprEqn, out: list[bool], length: int) -> tuple[float, list[bool]]:
        name, params, everything = equation.primitive.name, equation.params, [True] * len(equation.invars)
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            shape = _array(equation.invars[0]).shape
            return 2.0 * _array(equation.outvars[0]).size * math.prod(shape[d] for d in contracted), everything
        if name.startswith("ragged_dot"):
            return self._ragged(equation), everything
        if name == "scan":
            return self._scan(equation, out)
        if name == "while":
            carried = [True] * len(params["body_jaxpr"].jaxpr.outvars)
            return (length + 1) / 2 * self.count(params["body_jaxpr"].jaxpr, carried, 1)[0], everything
        if name == "cond":
            counts = [self.count(branch.jaxpr, out, length) for branch in params["branches"]]
            return max(c[0] for c in counts), [True, *(any(uses) for uses in zip(*(c[1] for c in counts), strict=True))]
        inner = params.get("jaxpr", params.get("call_jaxpr"))
        inner = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
        # Reductions carry the program of one addition, which has no products.
        if not isinstance(inner, Jaxpr) or len(inner.invars) != len(equation.invars):
            return 0.0, everything
        flops, uses = self.count(inner, out, length)
        if name == "shard_map":
            # Its shapes are one device's.
            flops *= math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
        return flops, uses

    def _scan(self, equation: JaxprEqn, out: list[bool]) -> tuple[float, list[bool]]:
        (consts, carries), params = scan_parts(equation), equation.params
        wanted = list(out)
        while True:
            flops, uses = self.count(params["jaxpr"].jaxpr, wanted, params["length"])
            # What a round needs of the carry, the round before has to give.
            carried = [a or b for a, b in zip(wanted[:carries], uses[consts : consts + carries], strict=True)]
            if carried == wanted[:carries]:
                return params["length"] * flops, uses
            wanted[:carries] = carried

    def _ragged(self, equation: JaxprEqn) -> float:
        """Rows are the first dimension of the first operand, whether they are contracted (gradients of weights) or not."""
        rows, other = (_array(v) for v in equation.invars[:2])
        # [R, D] x [E, D, F], or [R, D] x [R, F].
        width = other.size // other.shape[0] // (rows.shape[1] if other.ndim == 3 else 1)
        return 2.0 * rows.size * width * self._ragged_share


def scan_parts(equation: JaxprEqn) -> tuple[int, int]:
    """(number of constants, number of carried values) of a scan, first among its inputs; carried ones are first among its outputs.

    Read off shapes, as what a round takes or gives a piece of has a dimension less inside: parameters of the primitive differ
    between versions of JAX.
    """
    inner = equation.params["jaxpr"].jaxpr

    def whole(outside: Sequence[Any], inside: Sequence[Any]) -> int:
        return sum(_array(a).ndim == _array(b).ndim for a, b in zip(outside, inside, strict=True))

    carries = whole(equation.outvars, inner.outvars)
    return whole(equation.invars, inner.invars) - carries, carries


def _array(value: Any) -> ShapedArray:
    """Shape and type of a value of the program."""
    aval = value.aval
    assert isinstance(aval, ShapedArray)
    return aval
