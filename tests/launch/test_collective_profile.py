"""Shares of collectives from a profile, of a program whose collectives are known."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"

# In a process of its own: two devices, a program with one all-reduce that takes a while and, four times, one all-to-all.
PROGRAM = """
import time
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from benches.collective_profile import collective_instructions, collective_table, profile_collectives

mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

def local(x):
    x = jax.lax.psum(x, "d")
    return jax.lax.fori_loop(0, 4, lambda _, c: jnp.tanh(jax.lax.all_to_all(c, "d", 0, 0, tiled=True)), x)

mapped = jax.shard_map(local, mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d"), check_vma=False)
x = jnp.ones((64, 4096))
compiled = jax.jit(mapped).lower(x).compile()
hlo = compiled.as_text()
x = jax.device_put(x, compiled.input_shardings[0][0])
print(sorted(set(collective_instructions(hlo).values())))
found = profile_collectives(lambda: jax.block_until_ready(compiled(x)), hlo, devices=2, steps=3)
shares = found["collectives"]
assert set(shares) == {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"}, shares
assert shares["all-reduce"] > 0 and shares["all-to-all"] > 0 and sum(shares.values()) <= 1, shares
assert shares["all-gather"] == shares["reduce-scatter"] == shares["collective-permute"] == 0, shares
assert found["profiled_seconds"] > 0
# A program without a collective has none in its profile, and says so in the table.
plain = jax.jit(jnp.tanh).lower(x).compile()
assert not any(profile_collectives(lambda: plain(x), plain.as_text(), devices=2, steps=1)["collectives"].values())
assert collective_table({"d=2": shares}).row_count == 1
"""

HLO = """
  %psum.3 = f32[8]{0} all-reduce(%p), channel_id=1, replica_groups={{0,1}}
  ROOT %x = (f32[4]{0}, /*index=5*/f32[4]{0}) all-to-all(%a, %b), metadata={op_name="jit(f)/all_gather"}
  %start.1 = (f32[4]{0}, f32[8]{0}) all-gather-start(%c)
  %done = f32[8]{0} all-gather-done(%start.1)
  %first = f32[4]{0} get-tuple-element(%x), index=0, metadata={op_name="all-reduce"}
"""


@pytest.fixture
def profile(monkeypatch):
    monkeypatch.syspath_prepend(LAUNCH)
    from benches import collective_profile

    return collective_profile


def test_collectives_are_found_by_what_they_are_not_by_their_names(profile):
    kinds = {"psum.3": "all-reduce", "x": "all-to-all", "start.1": "all-gather", "done": "all-gather"}
    assert profile.collective_instructions(HLO) == kinds


def test_shares_of_a_program_with_two_kinds(profile):
    paths = os.pathsep.join([str(LAUNCH), os.environ.get("PYTHONPATH", "")])
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=240, env=os.environ | flags)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "['all-reduce', 'all-to-all']"


def test_a_folder_without_a_trace_is_refused(profile, tmp_path):
    with pytest.raises(RuntimeError, match="the profiler wrote no"):
        profile.collective_seconds(tmp_path, {})
