"""Images and videos as a model takes them. S groups of rows, M devices of a group, n patches and k token rows of a device,
C patch values; B batch, T tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import numpy as np

from ernie_jax.data.vision.spread import Spread
from ernie_jax.models.inputs import TextInputs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class VisionInputs:
    """Patches where they are computed, of static shape; see `data.vision.spread_images`.

    Attributes:
      pixel_values: [S, M, n, C] normalised patches.
      segment_ids: [S, M, n] int32, equal within a frame, 0 at padding.
      position_ids: [S, M, n, 2] int32, row and column.
      pairs: [S, M, k, 2] int32, the two merged rows of each token row.
    """

    pixel_values: jax.Array
    segment_ids: jax.Array
    position_ids: jax.Array
    pairs: jax.Array

    @classmethod
    def of(cls, spread: Spread, pixel_values: np.ndarray) -> VisionInputs:
        """From the patches [N, C] of all images, one image after another."""
        arrays = (spread.place(pixel_values), spread.segment_ids, spread.position_ids, spread.pairs)
        return cls(*(jax.numpy.asarray(a) for a in arrays))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MultimodalInputs(TextInputs):
    """Tokens with their modalities, and the images among them.

    Attributes:
      input_ids, segment_ids: [B, T].
      position_ids: [B, T, 3] time, height, width, or [B, T] where the three are equal.
      modality_ids: [B, T] 0 text, 1 image, 2 video, markers included: which experts a token goes to; None sends all to text's.
      vision: the images and videos, None without.
      feature_ids: [B, T] the token row that replaces the embedding, -1 for none; in a group's own numbering when `grouped`.
      grouped: the rows of the batch fall into the S groups of `vision` in order, and each row's images are in its group;
        otherwise rows and images are in any groups and `feature_ids` counts through all of them.
    """

    modality_ids: jax.Array | None = None
    vision: VisionInputs | None = None
    feature_ids: jax.Array | None = None
    grouped: bool = field(default=True, metadata={"static": True})

    @property
    def modality(self) -> jax.Array | None:
        """[B, T] bool, true for the vision experts."""
        return None if self.modality_ids is None else self.modality_ids != 0
