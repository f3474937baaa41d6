"""How a step passes through the stages of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from ernie_jax.config.bounds import at_least
from ernie_jax.config.compute import one_of

PIPELINE_SCHEDULES = ("gpipe", "1f1b", "interleaved")


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """The schedule of a mesh with `config.mesh.pipeline` above 1.

    Attributes:
      schedule: `gpipe`, `1f1b` or `interleaved`; see `parallel.pipeline.schedules`.
      microbatches: parts of a step that follow each other through the stages; None for one a stage (1 without stages). With one
        stage they are computed one after another, as with `config.accumulate`.
      virtual_stages: chunks of layers of a stage, 2 or more for `interleaved` and 1 for the others.
    """

    schedule: str = "1f1b"
    microbatches: int | None = None
    virtual_stages: int = 1

    def __post_init__(self) -> None:
        one_of("config.pipeline", "schedule", self.schedule, PIPELINE_SCHEDULES)
        at_least("config.pipeline", 1, virtual_stages=self.virtual_stages)
        if self.microbatches is not None:
            at_least("config.pipeline", 1, microbatches=self.microbatches)
        interleaved = self.schedule == "interleaved"
        if interleaved and self.virtual_stages < 2:
            raise ValueError(
                f"config.pipeline.virtual_stages={self.virtual_stages} with schedule 'interleaved'; give it 2 or more, or take "
                "'1f1b'"
            )
        if not interleaved and self.virtual_stages != 1:
            raise ValueError(
                f"config.pipeline.virtual_stages={self.virtual_stages} with schedule {self.schedule!r}; only 'interleaved' has "
                "more than 1"
            )
