"""Schedules against what is known of them, and the slots they need."""

import itertools

import numpy as np
import pytest

from ernie_jax.parallel.pipeline import StagePlan, Timetable, forward_timetable, make_timetable, simulate
from ernie_jax.parallel.pipeline.timetable import assign_slots

SHAPES = [
    ("gpipe", 4, 8, 1),
    ("1f1b", 2, 1, 1),
    ("1f1b", 4, 8, 1),
    ("1f1b", 3, 7, 1),
    ("interleaved", 2, 4, 2),
    ("interleaved", 4, 8, 3),
]


def table_of(name, stages, microbatches, virtual):
    return make_timetable(name, stages=stages, microbatches=microbatches, virtual_stages=virtual)


@pytest.mark.parametrize(("name", "stages", "microbatches", "virtual"), SHAPES, ids=lambda v: str(v))
@pytest.mark.parametrize("backward_cost", [1.0, 3.0])
def test_the_bubble_is_that_of_the_formula(name, stages, microbatches, virtual, backward_cost):
    found = simulate(table_of(name, stages, microbatches, virtual), 1.0, backward_cost)
    assert found.bubble == pytest.approx((stages - 1) / (virtual * microbatches + stages - 1))
    np.testing.assert_allclose(found.busy, virtual * microbatches * (1 + backward_cost))


@pytest.mark.parametrize(("name", "stages", "microbatches", "virtual"), SHAPES, ids=lambda v: str(v))
def test_every_piece_of_work_is_done_once_and_after_what_it_needs(name, stages, microbatches, virtual):
    spans = simulate(table_of(name, stages, microbatches, virtual)).spans
    by_key = {(span.backward, span.chunk * stages + span.stage, span.microbatch): span for span in spans}
    assert len(by_key) == len(spans) == 2 * stages * virtual * microbatches
    last = stages * virtual - 1
    for (backward, k, m), span in by_key.items():
        assert span.end > span.start
        if not backward and k:
            assert span.start >= by_key[False, k - 1, m].end
        if backward:
            assert span.start >= by_key[True, k + 1, m].end if k < last else by_key[False, k, m].end
    for stage in range(stages):
        own = sorted((span for span in spans if span.stage == stage), key=lambda span: span.start)
        assert all(after.start >= before.end for before, after in itertools.pairwise(own))


def test_inputs_that_wait_grow_with_stages_and_not_with_microbatches():
    for microbatches in (8, 32):
        # Stage s keeps an input for 2 (S - 1 - s) ticks and the one of its use; the first keeps none, it has the tokens.
        found = simulate(table_of("1f1b", 4, microbatches, 1))
        assert found.waiting.tolist() == [0, 5, 3, 1]
        assert simulate(table_of("gpipe", 4, microbatches, 1)).waiting.tolist() == [0, *[microbatches] * 3]
    assert table_of("1f1b", 4, 32, 1).rows.cotangent_slots == 1


def test_a_slot_holds_one_input_at_a_time():
    for shape in SHAPES:
        table = table_of(*shape)
        rows, stages = table.rows, table.stages
        for s in range(stages):
            inside = {}
            for tick in range(table.ticks):
                slot = rows.backward_slot[tick, s]
                if rows.backward[tick, s] >= 0 and slot >= 0:
                    key = (rows.backward_chunk[tick, s], rows.backward[tick, s])
                    assert inside.pop(slot) == key
                arriving = rows.arrival_slot[tick, s]
                if arriving < rows.slots:
                    assert arriving not in inside
                    before = (s - 1) % stages
                    chunk = rows.forward_chunk[tick, before] + (s == 0)
                    inside[arriving] = (chunk, rows.forward[tick, before])
            assert not inside


def test_slots_are_as_few_as_overlaps():
    slots, count = assign_slots({(0, 0): (0, 2), (0, 1): (1, 3), (0, 2): (3, 4), (0, 3): (4, 5)})
    assert (slots[0, 0], slots[0, 1], slots[0, 2], slots[0, 3], count) == (0, 1, 0, 1, 2)


def test_a_pass_without_gradients_runs_the_last_virtual_stage_too():
    table = forward_timetable(stages=2, microbatches=3, virtual_stages=2)
    assert (table.rows.forward >= 0).sum(0).tolist() == [6, 6]
    assert (table.rows.backward >= 0).sum() == 0


def test_an_impossible_timetable_is_refused():
    with pytest.raises(ValueError, match="each forward after the one"):
        Timetable(np.array([[0], [0]]), None, 2, 1)
    with pytest.raises(ValueError, match="one of each a tick"):
        Timetable(np.array([[0, 0], [1, 1]]), None, 2, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedule": "1F1B"}, "unknown pipeline schedule '1F1B'"),
        ({"schedule": "1f1b", "virtual_stages": 2}, "only 'interleaved' has more than 1"),
        ({"schedule": "gpipe", "stages": 1}, "expected at least 2"),
        ({"schedule": "gpipe", "microbatches": 0}, "expected at least 2, 1 and 1"),
    ],
    ids=["name", "virtual", "stages", "microbatches"],
)
def test_bad_requests_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_timetable(**{"stages": 2, "microbatches": 2, **arguments})


@pytest.mark.parametrize(("repeats", "stages", "virtual"), [(8, 4, 1), (7, 4, 1), (51, 12, 1), (11, 2, 3)], ids=str)
def test_layers_are_spread_as_evenly_as_can_be(repeats, stages, virtual):
    plan = StagePlan.spread(repeats, stages, virtual)
    assert sum(plan.counts) == repeats and max(plan.counts) - min(plan.counts) <= 1
    # The ends have the embedding and the head besides, so what is left over goes to the middle first.
    assert plan.counts[-1] == min(plan.counts)
    stacked = np.arange(repeats * 2).reshape(repeats, 2)
    staged = np.asarray(plan.to_stages(stacked))
    assert staged.shape == (stages, virtual, plan.places, 2)
    np.testing.assert_array_equal(plan.from_stages(staged), stacked)
    order = [staged[k % stages, k // stages, i, 0] // 2 for k, count in enumerate(plan.counts) for i in range(count)]
    assert order == list(range(repeats))


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match=r"3 repeating layers cannot be spread over 2 pipeline stages x 2 virtual stages"):
        StagePlan.spread(3, 2, 2)
