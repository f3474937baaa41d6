"""Pipeline schedules behind one interface: a timetable by name, and one loop that runs any of them."""

from ernie_jax.parallel.pipeline.executor import PipelineInputs, PipelineSums, StageProgram, run_pipeline
from ernie_jax.parallel.pipeline.schedules import SCHEDULES, forward_timetable, make_timetable
from ernie_jax.parallel.pipeline.simulator import Simulation, Span, simulate
from ernie_jax.parallel.pipeline.stages import StagePlan
from ernie_jax.parallel.pipeline.timetable import Timetable

__all__ = [
    "SCHEDULES",
    "PipelineInputs",
    "PipelineSums",
    "Simulation",
    "Span",
    "StagePlan",
    "StageProgram",
    "Timetable",
    "forward_timetable",
    "make_timetable",
    "run_pipeline",
    "simulate",
]
