"""The rules table and the sharding snapshot of every preset's parameters."""

import json
from pathlib import Path

import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from ernie_jax.config import PRESETS
from ernie_jax.models import abstract_model
from ernie_jax.sharding import RULES, AxisRules, logical_axes, rules_named, variables_by_path

SNAPSHOT = Path(__file__).parent / "sharding_snapshot.json"


def test_spec_of_an_expert_weight():
    axes = ("layers", "expert", "expert_embed", None, "expert_mlp")
    assert rules_named("tp_sp").spec(axes) == P(None, "expert", None, None, "tensor")
    assert rules_named("fsdp").spec(axes) == P(None, "expert", "data", None, "tensor")


def test_an_unknown_axis_lists_the_known_ones():
    with pytest.raises(ValueError, match="logical axis 'embd' has no rule in 'tp_sp'; known axes"):
        rules_named("tp_sp").spec(("embd",))


def test_a_doubly_used_mesh_axis_prints_array_spec_and_rules():
    rules = rules_named("tp_sp").replace("mine", {"embed": ("tensor",)})
    with pytest.raises(ValueError, match=r"q_proj.*'embed' and 'heads' both map to mesh axis 'tensor' in rules 'mine'"):
        rules.spec(("embed", "heads", "head_dim"), "parameter q_proj")


def test_bad_tables():
    with pytest.raises(ValueError, match="unknown mesh axes"):
        AxisRules("mine", (("embed", ("model",)),))
    with pytest.raises(ValueError, match="two rules for 'embed'"):
        AxisRules("mine", (("embed", ()), ("embed", ("data",))))


def snapshot():
    found = {}
    for preset in PRESETS:
        variables = variables_by_path(nnx.state(abstract_model(PRESETS[preset])))
        for rules in sorted(RULES):
            found[f"{preset}, {rules}"] = {
                path: str(RULES[rules].spec(logical_axes(v), path)).replace("PartitionSpec", "") for path, v in variables.items()
            }
    return found


def test_sharding_snapshot():
    """Parameter path -> PartitionSpec; after a wanted change run `python -m tests.sharding.test_rules` and read the diff."""
    assert snapshot() == json.loads(SNAPSHOT.read_text())


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(snapshot(), indent=1, sort_keys=True) + "\n")
