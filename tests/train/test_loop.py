"""The order in which a run's loop delivers records and calls hooks."""

from types import SimpleNamespace

import jax.numpy as jnp

from ernie_jax.train.hooks import Hook
from ernie_jax.train.loop import Loop


class Seen(Hook):
    blocking = True

    def __init__(self):
        self.events = []

    def due(self, moment):
        return True

    def at_step(self, moment):
        self.events.append(("step", moment.step))

    def at_record(self, record, last):
        self.events.append(("record", record["step"], last))


def test_a_record_does_not_wait_for_hooks_of_the_next_step():
    """A hook that waits for its step would put that step's time on the record of the one before."""
    seen = Seen()
    metrics = {"tokens": jnp.float32(8), "skipped_in_a_row": jnp.int32(0)}
    loop = Loop(
        step_fn=lambda state, batch: (SimpleNamespace(step=state.step + 1), metrics),
        place=lambda batch: batch,
        hooks=[seen],
        steps=3,
        max_nonfinite=1,
        last_checkpoint=lambda: "none",
    )
    loop.run(SimpleNamespace(step=jnp.int32(0)), iter(range(3)), SimpleNamespace(requested=lambda step: False))
    assert seen.events == [
        ("step", 1),
        ("record", 1, False),
        ("step", 2),
        ("record", 2, False),
        ("step", 3),
        ("record", 3, True),
    ]
