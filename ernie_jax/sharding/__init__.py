"""The mesh, the logical-axis rules, the constraint helper and multi-host start-up."""

from ernie_jax.sharding.hosts import initialize_hosts
from ernie_jax.sharding.kernels import on_shards
from ernie_jax.sharding.layout import (
    Layout,
    constrain,
    constrain_cotangent,
    constrain_in_stage,
    current_layout,
    make_layout,
    use_layout,
)
from ernie_jax.sharding.mesh import MESH_AXES, make_mesh, mesh_sizes, one_device_mesh
from ernie_jax.sharding.parameters import logical_axes, map_variables, path_name, state_shardings, variables_by_path
from ernie_jax.sharding.rules import BATCH_AXES, MODEL_AXES, RULES, AxisRules, rules_named

__all__ = [
    "BATCH_AXES",
    "MESH_AXES",
    "MODEL_AXES",
    "RULES",
    "AxisRules",
    "Layout",
    "constrain",
    "constrain_cotangent",
    "constrain_in_stage",
    "current_layout",
    "initialize_hosts",
    "logical_axes",
    "make_layout",
    "make_mesh",
    "map_variables",
    "mesh_sizes",
    "on_shards",
    "one_device_mesh",
    "path_name",
    "rules_named",
    "state_shardings",
    "use_layout",
    "variables_by_path",
]
