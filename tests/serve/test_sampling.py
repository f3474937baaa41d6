"""Case 40: the edges of sampling."""

import jax.numpy as jnp
import numpy as np
import pytest

from ernie_jax.serve import SamplingConfig, SamplingRows, kept_tokens, sample

P = np.log(np.array([0.6, 0.3, 0.1], np.float32))


def kept(top_p=1.0, top_k=0, temperature=1.0, logits=P):
    row = [jnp.asarray([v]) for v in (temperature, top_k, top_p)]
    return set(np.flatnonzero(np.asarray(kept_tokens(jnp.asarray(logits)[None], *row))[0]))


@pytest.mark.parametrize(("top_p", "expected"), [(0.0, {0}), (0.5, {0}), (0.7, {0, 1}), (0.95, {0, 1, 2}), (1.0, {0, 1, 2})])
def test_top_p(top_p, expected):
    assert kept(top_p=top_p) == expected


@pytest.mark.parametrize(("top_k", "expected"), [(0, {0, 1, 2}), (1, {0}), (2, {0, 1}), (3, {0, 1, 2}), (1000, {0, 1, 2})])
def test_top_k(top_k, expected):
    assert kept(top_k=top_k) == expected


def test_top_p_counts_what_top_k_left():
    # Of {0.6, 0.3}, renormalised to {2/3, 1/3}, 0.65 is reached by the first alone.
    assert kept(top_k=2, top_p=0.65) == {0}
    assert kept(top_k=2, top_p=0.7) == {0, 1}


def test_temperature_zero_is_argmax_even_for_infinite_logits():
    logits = jnp.asarray([[1.0, -jnp.inf, 5.0, 2.0], [0.0, 0.0, -1.0, -jnp.inf]])
    rows = SamplingRows.of([SamplingConfig(), SamplingConfig(top_k=1, top_p=0.0)])
    assert sample(logits, rows, jnp.int32(0)).tolist() == [2, 0]


def test_a_draw_depends_on_its_own_row_only():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(3, 50)), jnp.float32)
    configs = [SamplingConfig(temperature=1.0, seed=s) for s in (5, 6, 7)]
    together = sample(logits, SamplingRows.of(configs), jnp.int32(4))
    alone = [int(sample(logits[i : i + 1], SamplingRows.of(configs[i : i + 1]), jnp.int32(4))[0]) for i in range(3)]
    assert together.tolist() == alone


def test_draws_follow_the_distribution():
    rows = SamplingRows.of([SamplingConfig(temperature=1.0, top_p=0.7, seed=s) for s in range(3000)])
    drawn = np.asarray(sample(jnp.broadcast_to(jnp.asarray(P), (3000, 3)), rows, jnp.int32(0)))
    assert set(drawn) == {0, 1}
    assert abs((drawn == 0).mean() - 2 / 3) < 3 * np.sqrt(2 / 9 / 3000)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1}, "temperature=-1"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_k": -2}, "top_k=-2"),
        ({"temperature": float("nan")}, "nan"),
    ],
)
def test_bad_settings(values, message):
    with pytest.raises(ValueError, match=message):
        SamplingConfig(**values)
