"""Checkpoints of training states. Cases: save on one mesh and read on another, damaged steps, silent casts."""

import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ernie_jax.checkpoint import TrainCheckpointer
from ernie_jax.sharding import make_mesh


def _state(value=0.0, mesh=None):
    rows = jnp.arange(64, dtype=jnp.float32).reshape(8, 8) + value
    state = {
        "step": jnp.int32(16777217),
        "params": {"decoder": {"weight": rows}, "half": (rows / 3).astype(jnp.bfloat16)},
        "opt_state": ({"mu": {"decoder/weight": rows * 0.1}}, ()),
        "ema": None,
    }
    if mesh is not None:
        spec = jax.sharding.PartitionSpec("data", ("tensor", "expert"))
        state["params"] = jax.device_put(state["params"], jax.sharding.NamedSharding(mesh, spec))
    return state


def _abstract(state, sharding=None):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state)


def _assert_equal(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.fixture
def saved(tmp_path):
    """A folder with steps 1 and 2, closed."""
    with TrainCheckpointer(tmp_path / "checkpoints", keep=5) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, _state(step), {"data": {"position": step}, "note": None})
    return tmp_path / "checkpoints"


@pytest.mark.parametrize("sizes", [{}, {"data": 8}, {"pipeline": 2, "expert": 4}])
@pytest.mark.parametrize("active", [False, True])
def test_restored_onto_another_mesh(tmp_path, sizes, active):
    state = _state(mesh=make_mesh(data=2, tensor=2, expert=2))
    devices = jax.devices()[: int(np.prod(list(sizes.values()) or [1]))]
    mesh = make_mesh(**sizes, devices=devices)
    spec = jax.sharding.PartitionSpec(("data", "expert")) if sizes else jax.sharding.PartitionSpec()
    wanted = _abstract(state, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    wanted["params"] = _abstract(state["params"], jax.sharding.NamedSharding(mesh, spec))
    with TrainCheckpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(3, state, {})
        checkpointer.wait()
        if active:
            with jax.set_mesh(mesh):
                got, _ = checkpointer.restore(3, wanted)
        else:
            got, _ = checkpointer.restore(3, wanted)
    _assert_equal(got, state)
    assert got["params"]["half"].sharding.is_equivalent_to(wanted["params"]["half"].sharding, 2)


def test_restored_as_numpy(saved):
    with TrainCheckpointer(saved, read_only=True) as checkpointer:
        got, extra = checkpointer.restore(2, _abstract(_state()))
        plain, _ = checkpointer.restore_numpy(1)
        assert checkpointer.extra(1) == {"data": {"position": 1}, "note": None}
    assert extra == {"data": {"position": 2}, "note": None}
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(got))
    _assert_equal(got, _state(2))
    assert sorted(plain) == ["opt_state/0/mu/decoder/weight", "params/decoder/weight", "params/half", "step"]
    np.testing.assert_array_equal(plain["params/decoder/weight"], np.arange(64.0).reshape(8, 8) + 1)


def test_only_the_leaves_that_are_asked_for(saved):
    wanted = {"params": _abstract(_state()["params"])}
    with TrainCheckpointer(saved, read_only=True) as checkpointer:
        with pytest.raises(ValueError, match="only in the checkpoint: step"):
            checkpointer.restore(2, wanted)
        got, _ = checkpointer.restore(2, wanted, partial=True)
    _assert_equal(got, {"params": _state(2)["params"]})


def test_buffers_may_be_given_away_while_they_are_written(tmp_path):
    update = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    mesh = make_mesh(data=2, tensor=2, expert=2)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    state = jax.device_put({"a": jnp.zeros(1 << 20), "b": jnp.zeros(1 << 20)}, sharding)
    with TrainCheckpointer(tmp_path, keep=10) as checkpointer:
        for step in range(1, 4):
            state = update(state)
            checkpointer.save(step, state, {})
            state = update(update(state))
            jax.block_until_ready(state)
        checkpointer.wait()
        for step in range(1, 4):
            leaves, _ = checkpointer.restore_numpy(step)
            assert all((leaf == 3 * step - 2).all() for leaf in leaves.values())


def test_keeps_the_last_and_every_nth(tmp_path):
    with TrainCheckpointer(tmp_path, keep=2, keep_every=4) as checkpointer:
        for step in range(1, 8):
            checkpointer.save(step, _state(), {})
        checkpointer.wait()
        assert checkpointer.steps() == (4, 6, 7)
        assert checkpointer.latest_valid_step() == 7


def test_a_saved_step_stays_unless_forced(saved):
    with TrainCheckpointer(saved, keep=5) as checkpointer:
        assert not checkpointer.save(2, _state(9), {})
        assert checkpointer.extra(2) == {"data": {"position": 2}, "note": None}
        assert checkpointer.save(2, _state(9), {"new": True}, force=True)
        checkpointer.wait()
        assert checkpointer.extra(2) == {"new": True}


def _empty(folder):
    for path in sorted(folder.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()


def _truncate(folder):
    largest = max((p for p in folder.rglob("*") if p.is_file() and p.parent.name == "d"), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])


def _lose_a_file(folder):
    next(p for p in folder.rglob("*") if p.is_file() and p.parent.name == "d").unlink()


def _never_commit(folder):
    folder.rename(folder.with_name(folder.name + ".orbax-checkpoint-tmp"))


@pytest.mark.parametrize("spoil", [_empty, _truncate, _lose_a_file])
def test_damaged_newest_step_is_skipped_and_saved_again(saved, spoil, caplog):
    spoil(saved / "2")
    with TrainCheckpointer(saved, keep=1) as checkpointer, caplog.at_level(logging.WARNING):
        assert checkpointer.latest_valid_step() == 1
        assert "checkpoint of step 2" in caplog.text
        _assert_equal(checkpointer.restore(1, _abstract(_state()))[0], _state(1))
        assert checkpointer.save(2, _state(7), {})
        checkpointer.wait()
        assert checkpointer.latest_valid_step() == 2
        _assert_equal(checkpointer.restore(2, _abstract(_state()))[0], _state(7))


def test_damaged_steps_do_not_count_among_those_kept(saved):
    _truncate(saved / "2")
    with TrainCheckpointer(saved, keep=2) as checkpointer:
        checkpointer.save(3, _state(3), {})
        checkpointer.wait()
        assert checkpointer.steps() == (1, 3)


def test_uncommitted_step_is_not_seen_and_its_number_is_free(saved):
    _never_commit(saved / "2")
    with TrainCheckpointer(saved, keep=5) as checkpointer:
        assert checkpointer.latest_valid_step() == 1
        checkpointer.save(2, _state(5), {})
        checkpointer.wait()
        assert checkpointer.steps() == (1, 2)


def test_reading_a_damaged_step_names_it(saved):
    _truncate(saved / "2")
    with TrainCheckpointer(saved, read_only=True) as checkpointer:
        with pytest.raises(ValueError, match=r"checkpoints/2 cannot be read"):
            checkpointer.restore(2, _abstract(_state()))
        with pytest.raises(ValueError, match=r"no checkpoint of step 7 .* there are \[1, 2\]"):
            checkpointer.restore(7, _abstract(_state()))


def test_no_silent_cast(saved):
    wanted = _abstract(_state())
    wanted["step"] = jax.ShapeDtypeStruct((), jnp.float32)
    wanted["params"]["half"] = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    with TrainCheckpointer(saved, read_only=True) as checkpointer:
        with pytest.raises(ValueError, match=r"step was saved as int32, asked for as float32$") as error:
            checkpointer.restore(2, wanted)
        assert "params/half was saved as bfloat16, asked for as float32; pass cast=True" in str(error.value)
        # The flag is for floating-point formats alone: a counter stays a counter.
        with pytest.raises(ValueError, match=r"step was saved as int32") as error:
            checkpointer.restore(2, wanted, cast=True)
        assert "params/half" not in str(error.value)
        wanted["step"] = jax.ShapeDtypeStruct((), jnp.int32)
        got, _ = checkpointer.restore(2, wanted, cast=True)
    assert got["step"] == 16777217
    assert got["params"]["half"].dtype == np.float32
    np.testing.assert_array_equal(got["params"]["half"], np.asarray(_state(2)["params"]["half"], np.float32))


def test_every_difference_is_listed(saved):
    wanted = _abstract(_state())
    wanted["params"]["decoder"] = {"weights": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    wanted["params"]["half"] = jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)
    with TrainCheckpointer(saved, read_only=True) as checkpointer, pytest.raises(ValueError, match="does not fit") as error:
        checkpointer.restore(2, wanted)
    assert "missing in the checkpoint: params/decoder/weights (did you mean 'params/decoder/weight'?)" in str(error.value)
    assert "only in the checkpoint: params/decoder/weight" in str(error.value)
    assert "params/half was saved as (8, 8), asked for as (4, 8)" in str(error.value)


def test_user_errors(tmp_path, saved):
    with pytest.raises(ValueError, match="keep=0"):
        TrainCheckpointer(tmp_path, keep=0)
    with pytest.raises(ValueError, match="no checkpoints at"):
        TrainCheckpointer(tmp_path / "nowhere", read_only=True)
    with TrainCheckpointer(saved, read_only=True) as checkpointer, pytest.raises(ValueError, match="read-only"):
        checkpointer.save(3, _state(), {})
    with TrainCheckpointer(saved) as checkpointer:
        with pytest.raises(ValueError, match="`extra` of step 3 is not JSON"):
            checkpointer.save(3, _state(), {"x": object()})
        with pytest.raises(ValueError, match=r"leaf name of the state is a str"):
            checkpointer.save(3, {"name": "x"}, {})
        assert checkpointer.steps() == (1, 2)


def test_synchronous_save_is_complete_on_return(tmp_path):
    with TrainCheckpointer(tmp_path, async_save=False) as checkpointer:
        checkpointer.save(1, _state(), {"a": 1})
        assert json.loads((tmp_path / "1" / "files.json").read_text())
        assert checkpointer.steps() == (1,)
