"""Batches as the data pipelines give them: which arrays, where they live, and the model's inputs in them.

B rows, T tokens, S groups of rows, M devices of a group, n patches and k token rows of a device, C patch values.
"""

from __future__ import annotations

import jax
from jax.sharding import NamedSharding

from ernie_jax.models.inputs import TextInputs
from ernie_jax.models.vision_inputs import MultimodalInputs, VisionInputs
from ernie_jax.sharding import Layout

Batch = dict[str, jax.Array]

# [B, T] each.
TEXT_KEYS = ("input_ids", "labels", "segment_ids", "position_ids")
# Of a vision-language model `position_ids` is [B, T, 3] (time, height, width), and there are, [B, T] each: `modality_ids` (who goes
# to the vision experts), `document_kinds` (1 in documents with images), `feature_ids` (a token's row of features, or -1).
TOKEN_KEYS = (*TEXT_KEYS, "modality_ids", "document_kinds", "feature_ids")
# Patches spread over the devices: [S, M, n, C], [S, M, n], [S, M, n, 2], [S, M, k, 2].
PATCH_KEYS = ("pixel_values", "patch_segment_ids", "patch_position_ids", "patch_pairs")
MULTIMODAL_KEYS = (*TOKEN_KEYS, *PATCH_KEYS)


def logical_axes_of(key: str) -> tuple[str | None, ...]:
    """The logical names of an array's leading dimensions."""
    return ("batch", "image_devices") if key in PATCH_KEYS else ("batch",)


def batch_shardings(layout: Layout, *, multimodal: bool) -> dict[str, NamedSharding]:
    """The sharding of each array of a batch: rows over the batch shards, patches over every device."""
    keys = MULTIMODAL_KEYS if multimodal else TEXT_KEYS
    return {key: layout.sharding(logical_axes_of(key), f"{key} of a batch") for key in keys}


def inputs_of(batch: Batch) -> TextInputs:
    """The model's inputs of a batch (trusted: the pipeline checks them)."""
    tokens = batch["input_ids"], batch["segment_ids"], batch["position_ids"]
    if "modality_ids" not in batch:
        return TextInputs(*tokens)
    # Without its patches, the batch's features come from elsewhere.
    vision = VisionInputs(*(batch[key] for key in PATCH_KEYS)) if "pixel_values" in batch else None
    return MultimodalInputs(*tokens, batch["modality_ids"], vision, batch["feature_ids"])
