"""Sides of a bench in processes of their own: what they report of themselves."""

from pathlib import Path

LAUNCH = Path(__file__).parents[2] / "launch"


def test_runs_that_do_not_count_are_no_other_processes_load(monkeypatch):
    monkeypatch.syspath_prepend(LAUNCH)
    from benches.workers import Worker, take_turns

    with Worker("benches.machine:Machine", {}) as one, Worker("benches.machine:Machine", {}) as other:
        rounds = list(take_turns({"one": one, "other": other}, 2, warm_up=1))
        spent = one.spent + other.spent
    counted = sum(part["cpu_seconds"] for r in rounds for side in r.values() for part in side.values())
    # Each once to warm up and twice in each round, of which the second counts: five runs for two.
    assert 1.6 * counted < spent < 4 * counted


def test_parts_of_one_side_run_twice_in_their_turn_too(monkeypatch):
    monkeypatch.syspath_prepend(LAUNCH)
    from benches.workers import Worker, take_turns

    with Worker("benches.machine:Machine", {}) as machine:
        rounds = list(take_turns({"machine": machine}, 1, warm_up=0))
        assert {part: len(runs) for part, runs in machine.results().items()} == {"matmul": 2, "bandwidth": 2}
    assert set(rounds[0]["machine"]) == {"matmul", "bandwidth"}
