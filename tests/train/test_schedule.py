import math

import jax
import numpy as np
import pytest

from ernie_jax.config.run import ScheduleConfig
from ernie_jax.train.schedule import Schedule

PUBLISHED = {"peak": 2.2e-4, "minimum": 2.2e-5, "warmup": 200}


def make(total, **config):
    return Schedule(ScheduleConfig(**config), total)


@pytest.mark.parametrize(
    ("tail", "values"),
    [
        ("1-sqrt", {900: 2.2e-4, 925: 1.21e-4, 950: 8.0e-5, 975: 4.85e-5, 1000: 2.2e-5}),
        ("half_life", {900: 2.2e-4, 925: 1.10e-4, 950: 5.82e-5, 975: 3.36e-5, 1000: 2.2e-5}),
    ],
)
def test_wsd_has_the_published_values(tail, values):
    schedule = make(1000, kind="wsd", tail=tail, **PUBLISHED)
    for step, rate in values.items():
        assert float(schedule(step)) == pytest.approx(rate, rel=4e-3), step
    assert float(schedule(0)) == 0.0
    assert float(schedule(50)) == pytest.approx(2.2e-4 / 4)
    assert float(schedule(200)) == float(schedule(899)) == pytest.approx(2.2e-4)
    assert float(schedule(5000)) == pytest.approx(2.2e-5)


@pytest.mark.parametrize("tail", ["1-sqrt", "half_life"])
def test_wsd_equals_its_formula_with_a_given_steady_end(tail):
    schedule = make(1000, kind="wsd", tail=tail, steady_end=600, **PUBLISHED)
    for step in range(0, 1001, 7):
        p = (step - 600) / 400
        if step < 200:
            want = 2.2e-4 * step / 200
        elif step < 600:
            want = 2.2e-4
        else:
            r = 1 - math.sqrt(p) if tail == "1-sqrt" else (0.05**p - 0.05) / 0.95
            want = 2.2e-4 * (r * 0.9 + 0.1)
        assert float(schedule(step)) == pytest.approx(want, rel=1e-5, abs=1e-12), step


def test_cosine_goes_from_peak_to_minimum_in_half_a_wave():
    schedule = make(110, kind="cosine", peak=1.0, minimum=0.1, warmup=10)
    want = {0: 0.0, 5: 0.5, 10: 1.0, 60: 0.55, 110: 0.1, 200: 0.1, 35: 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2}
    for step, rate in want.items():
        assert float(schedule(step)) == pytest.approx(rate, rel=1e-5), step


def test_constant_warms_up_and_stays():
    schedule = make(8, kind="constant", peak=0.5, minimum=0.1, warmup=4)
    assert [float(schedule(s)) for s in (0, 2, 4, 8, 100)] == [0.0, 0.25, 0.5, 0.5, 0.5]


def test_decay_of_no_steps_is_finite():
    schedule = make(10, kind="wsd", peak=1.0, minimum=0.1, steady_end=10)
    assert [float(schedule(s)) for s in (9, 10)] == [1.0, 1.0]


def test_rates_are_the_same_traced_and_stepwise():
    schedule = make(1000, kind="wsd", **PUBLISHED)
    traced = jax.jit(jax.vmap(schedule))(np.arange(0, 1001, 50))
    np.testing.assert_allclose(traced, [float(schedule(s)) for s in range(0, 1001, 50)], rtol=1e-6)


def test_a_steady_part_longer_than_the_run_never_decays():
    schedule = make(100, kind="wsd", peak=1.0, minimum=0.1, steady_end=231084)
    assert [float(schedule(s)) for s in (50, 99, 100)] == [1.0, 1.0, 1.0]
