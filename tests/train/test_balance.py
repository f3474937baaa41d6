"""The router bias over a whole step, and that recomputation counts nothing twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ernie_jax.sharding import map_variables
from ernie_jax.testing import tiny_moe
from ernie_jax.train.step import make_train_step

LAYER = tiny_moe(num_hidden_layers=1, layer_start=0, num_experts=4, num_experts_per_tok=1)


def steered(state):
    """Token e goes to expert e: one-hot embeddings and gates, and an attention that adds nothing."""

    def value(path, variable):
        current = np.asarray(variable.get_value())
        if path.endswith(("embedding", "router/gate")):
            return jnp.broadcast_to(jnp.eye(*current.shape[-2:]), current.shape)
        return jnp.zeros(current.shape) if path.endswith("o_proj") else jnp.asarray(current)

    from dataclasses import replace

    return replace(state, params=map_variables(value, state.params))


@pytest.mark.parametrize(("accumulate", "mesh"), [(2, {}), (1, {"data": 2})])
def test_bias_follows_the_load_of_the_whole_step(accumulate, mesh, tiny_run, layout_of, fresh_state):
    # Case 4: counts [3, 1, 0, 0] and [0, 0, 3, 1] add up to one update by the sign of the sum.
    run = tiny_run(model=LAYER, batch_size=2, seq_len=4, accumulate=accumulate)
    ids = np.array([[0, 0, 0, 1], [2, 2, 2, 3]], np.int32)
    batch = {
        "input_ids": ids,
        "labels": np.full_like(ids, 7),
        "segment_ids": np.ones_like(ids),
        "position_ids": np.broadcast_to(np.arange(4, dtype=np.int32), (2, 4)),
    }
    layout = layout_of(run, **mesh)
    state = steered(fresh_state(run, layout_of(run)))
    from ernie_jax.train.state import state_shardings

    state, metrics = make_train_step(run, layout)(jax.device_put(state, state_shardings(run, layout)), batch)
    np.testing.assert_array_equal(metrics["router"]["load"], [[3, 1, 3, 1]])
    (bias,) = jax.tree.leaves(state.biases)
    assert bias.dtype == jnp.float32
    np.testing.assert_allclose(bias, [1e-3 * np.array([-1.0, 1.0, -1.0, 1.0])], rtol=1e-6)


def test_recomputation_changes_no_count_no_loss_and_no_bias(tiny_run, layout_of, fresh_state, batch_of, assert_close):
    # Case 5.
    results = {}
    for remat in ("none", "full", ("attn_out", "expert_in")):
        run = tiny_run(model=LAYER, remat=remat, batch_size=4)
        layout = layout_of(run)
        state, metrics = make_train_step(run, layout)(fresh_state(run, layout), batch_of(run))
        results[str(remat)] = jax.device_get((state.biases, metrics))
        np.testing.assert_array_equal(metrics["router"]["load"].sum(-1), [metrics["tokens"]])
    none, *others = results.values()
    for other in others:
        assert_close(other, none)


@pytest.mark.parametrize("frozen", ["freeze_gate", "freeze_bias"])
def test_frozen_parts_of_the_router_stay_as_they_were(frozen, tiny_run, layout_of, fresh_state, batch_of):
    run = tiny_run(model=LAYER, batch_size=4, moe={frozen: True, "aux_loss_coef": 0.1})
    layout = layout_of(run)
    before = jax.device_get(fresh_state(run, layout))
    state, _ = make_train_step(run, layout)(fresh_state(run, layout), batch_of(run))
    moments = state.opt_state.mu
    gates = [path for path in moments if path.endswith("router/gate")]
    assert bool(gates) == (frozen == "freeze_bias")
    np.testing.assert_array_equal(jax.tree.leaves(state.biases)[0], 0.0)

    def gate(s):
        return np.asarray(s.params["decoder"]["segments"][0]["layers"][0]["moe"]["router"]["gate"].get_value())

    assert np.array_equal(gate(state), gate(before)) == (frozen == "freeze_gate")
