"""Training: state, step, schedules, loop, hooks, and whole runs."""

from ernie_jax.train.loop import NonFiniteError
from ernie_jax.train.run import RunResult, train
from ernie_jax.train.schedule import Schedule
from ernie_jax.train.state import TrainState, abstract_state, init_state, run_layout, state_shardings
from ernie_jax.train.step import make_eval_step, make_train_step

__all__ = [
    "NonFiniteError",
    "RunResult",
    "Schedule",
    "TrainState",
    "abstract_state",
    "init_state",
    "make_eval_step",
    "make_train_step",
    "run_layout",
    "state_shardings",
    "train",
]
