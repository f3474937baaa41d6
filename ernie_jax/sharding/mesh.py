"""The one place that builds meshes: four named axes over the devices JAX found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

# Outermost first: pipeline stages talk least and may span hosts, expert and tensor groups talk most and stay within one.
MESH_AXES = ("pipeline", "data", "expert", "tensor")


def mesh_sizes(num_devices: int, *, data: int = 1, tensor: int = 1, pipeline: int = 1, expert: int = 1) -> dict[str, int]:
    """The four axis sizes, with a single -1 replaced by what the other axes leave of `num_devices`.

    Raises:
      ValueError: a size that is neither positive nor -1, more than one -1, or a product other than the device count.
    """
    sizes = {"pipeline": pipeline, "data": data, "expert": expert, "tensor": tensor}
    shown = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    for axis, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            raise ValueError(f"mesh axis {axis}={size!r}; expected a positive integer, or -1 for the rest of the devices ({shown})")
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise ValueError(f"mesh axes {', '.join(free)} are all -1; at most one axis may take the rest of the devices ({shown})")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if free:
        if num_devices % fixed:
            raise ValueError(
                f"mesh ({shown}): the fixed axes need groups of {fixed} devices, which does not divide the {num_devices} devices; "
                f"choose sizes whose product divides {num_devices}"
            )
        sizes[free[0]] = num_devices // fixed
    elif fixed != num_devices:
        raise ValueError(
            f"mesh ({shown}) needs {fixed} devices, but there are {num_devices}; change a size, give one axis -1, "
            "or pass `devices` with exactly as many as the product (on a CPU, "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={fixed} makes {fixed} fake devices)"
        )
    return sizes


def make_mesh(
    *, data: int = 1, tensor: int = 1, pipeline: int = 1, expert: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh with axes `(data, tensor, pipeline, expert)`; one axis may be -1 and takes the devices that are left.

    Args:
      data: replicas of the batch (and shards of optimiser or parameters with ZeRO).
      tensor: shards of attention heads, MLP width and vocabulary; also of the sequence between blocks.
      pipeline: stages, each with some of the layers.
      expert: shards of the routed experts; outside MoE layers one more data axis.
      devices: the devices to use, all of them by default.

    Raises:
      ValueError: sizes that do not fit the number of devices, with every size and the count.
    """
    chosen = list(jax.devices() if devices is None else devices)
    sizes = mesh_sizes(len(chosen), data=data, tensor=tensor, pipeline=pipeline, expert=expert)
    # Auto, because jax.make_mesh defaults to Explicit axes, under which every operation must spell its sharding.
    return jax.make_mesh(
        tuple(sizes[axis] for axis in MESH_AXES), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES), devices=chosen
    )


def abstract_mesh(sizes: Mapping[str, int]) -> AbstractMesh:
    """A mesh of these axis sizes without devices: enough for shapes, specs and shardings."""
    return AbstractMesh(tuple(sizes[axis] for axis in MESH_AXES), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def one_device_mesh(device: jax.Device | None = None) -> Mesh:
    """A mesh of a single device: where no other is given, and the oracle of every parallel test."""
    return make_mesh(devices=[jax.devices()[0] if device is None else device])
