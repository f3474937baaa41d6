"""What a run would need and how fast it would go, worked out before any machine is rented.

The package is itself the function that plans: `ernie_jax.plan("ernie-4.5-21b-a3b", "h100:64")` is `plan.plan.make_plan(...)`.
"""

from __future__ import annotations

import inspect
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ernie_jax.plan.plan import Plan


class _CallablePackage(types.ModuleType):
    """A package that can be called, since the function and the package have one name; it imports nothing before it is."""

    def __call__(self, *args: Any, **settings: Any) -> Plan:
        from ernie_jax.plan.plan import make_plan

        return make_plan(*args, **settings)

    @property
    def __signature__(self) -> inspect.Signature:
        from ernie_jax.plan.plan import make_plan

        return inspect.signature(make_plan)


sys.modules[__name__].__class__ = _CallablePackage
