"""A run's layout on a mesh that does not exist: sizes and names of axes are enough for every shape and sharding."""

from __future__ import annotations

from ernie_jax.config.run import RunConfig
from ernie_jax.sharding import Layout, make_layout
from ernie_jax.sharding.mesh import abstract_mesh


def abstract_layout(run: RunConfig) -> Layout:
    """The layout of a run's parameters and activations, with every size checked; no device is touched.

    Raises:
      ValueError: an axis of -1, which leaves its size to devices that are not there; a size of the model that its axes do not
        divide.
    """
    sizes = run.mesh.sizes
    if -1 in sizes.values():
        free = next(axis for axis, size in sizes.items() if size == -1)
        raise ValueError(f"config.mesh.{free}=-1 takes the devices that are found, and a plan has none; give its size")
    # Rules and specs ask a mesh for sizes alone, and those an abstract one has.
    return make_layout(abstract_mesh(sizes), run.model, run.mesh.rules)  # type: ignore[arg-type]
