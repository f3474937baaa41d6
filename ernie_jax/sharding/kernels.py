"""Kernels that the compiler cannot split, run by each device on its own part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ernie_jax.sharding.layout import Layout

Axes = Sequence[str | None]


def on_shards(
    kernel: Callable[..., Any], layout: Layout | None, inputs: Sequence[Axes], outputs: Sequence[Axes]
) -> Callable[..., Any]:
    """`kernel`, which takes and returns tuples of arrays, over the devices of a mesh; as it is without one.

    To the compiler a kernel of our own is a black box: of arrays that are split over devices it would bring all parts together
    first. It has no gradient: give the kernel of the backward pass to another call.

    Args:
      kernel: what a device does with its parts; every part must stand for itself.
      layout: mesh and rules.
      inputs: logical axes of each argument, whose sizes the mesh divides.
      outputs: of each result.
    """
    if layout is None or layout.mesh.size == 1:
        return kernel
    return jax.shard_map(
        kernel,
        mesh=layout.mesh_in_force,
        axis_names=set(layout.automatic_axes),
        in_specs=tuple(layout.spec(axes) for axes in inputs),
        out_specs=tuple(layout.spec(axes) for axes in outputs),
        # Nested in manual pipeline stages the check fails to lower; tests compare gradients with one device instead.
        check_vma=False,
    )
