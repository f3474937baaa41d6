"""Which layers a stage holds. R repeats of the pipelined segment, S stages, v chunks a stage, C places of a chunk."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class StagePlan:
    """The repeats of a segment spread over virtual stages, number k = chunk S + stage in the order of the layers.

    Attributes:
      stages: S.
      counts: [K] repeats of each virtual stage, at least 1 each.
    """

    stages: int
    counts: tuple[int, ...]

    @classmethod
    def spread(cls, repeats: int, stages: int, virtual_stages: int = 1) -> StagePlan:
        """As evenly as can be; what is left over goes to the virtual stages in the middle, since the first has the embedding
        and the dense prefix too, and the last the head.

        Raises:
          ValueError: fewer repeats than virtual stages.
        """
        virtual = stages * virtual_stages
        if repeats < virtual:
            chunks = f" x {virtual_stages} virtual stages" if virtual_stages > 1 else ""
            raise ValueError(
                f"{repeats} repeating layers cannot be spread over {stages} pipeline stages{chunks}: each needs at least one; "
                f"choose at most {repeats} in all"
            )
        counts = np.full(virtual, repeats // virtual)
        order = [*range(1, virtual - 1), 0, virtual - 1]
        counts[order[: repeats % virtual]] += 1
        return cls(stages, tuple(int(n) for n in counts))

    @property
    def virtual_stages(self) -> int:
        """v."""
        return len(self.counts) // self.stages

    @property
    def places(self) -> int:
        """C, repeats of the fullest chunk; emptier ones have places that do nothing."""
        return max(self.counts)

    @property
    def repeats(self) -> int:
        """R."""
        return sum(self.counts)

    @property
    def counts_by_stage(self) -> np.ndarray:
        """[S, v] repeats of each chunk."""
        return np.array(self.counts, np.int32).reshape(-1, self.stages).T

    def repeat_of(self, stage: int, chunk: int) -> tuple[int, int]:
        """The repeats of a chunk: from the first to the one behind the last."""
        k = chunk * self.stages + stage
        first = sum(self.counts[:k])
        return first, first + self.counts[k]

    def to_stages(self, stacked: jax.Array) -> jax.Array:
        """[R, ...] -> [S, v, C, ...]; places that do nothing hold zeros."""
        if self._identity:
            return stacked.reshape(self.stages, 1, self.places, *stacked.shape[1:])
        # Slices rather than a look-up: of a look-up the partitioner would send the indices around.
        rest = ((0, 0),) * (stacked.ndim - 1)
        chunks = [
            jnp.pad(stacked[first:end], ((0, self.places - (end - first)), *rest))
            for first, end in (self.repeat_of(s, c) for s in range(self.stages) for c in range(self.virtual_stages))
        ]
        return jnp.stack(chunks).reshape(self.stages, self.virtual_stages, self.places, *stacked.shape[1:])

    def from_stages(self, staged: jax.Array) -> jax.Array:
        """[S, v, C, ...] -> [R, ...]."""
        if self._identity:
            return staged.reshape(-1, *staged.shape[3:])
        return jnp.concatenate([staged[k % self.stages, k // self.stages, :count] for k, count in enumerate(self.counts)])

    @property
    def _identity(self) -> bool:
        return self.virtual_stages == 1 and len(set(self.counts)) == 1
