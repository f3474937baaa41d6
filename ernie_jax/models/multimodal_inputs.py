"""Inputs of a vision-language model from what `transformers` takes: patches, grids and token types. B batch, T tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ernie_jax.config.model import VisionConfig
from ernie_jax.data.vision.geometry import Grid, check_grid, tokens_of_grid
from ernie_jax.data.vision.positions import IMAGE, TEXT, VIDEO, grids_of_rows, stream_positions
from ernie_jax.data.vision.spread import Spread, spread_images
from ernie_jax.models.inputs import TextInputs
from ernie_jax.models.vision_inputs import MultimodalInputs, VisionInputs
from ernie_jax.sharding import BATCH_AXES, MODEL_AXES, Layout

_log = logging.getLogger(__name__)


def multimodal_inputs(
    vision: VisionConfig,
    inputs: TextInputs,
    layout: Layout | None,
    *,
    position_ids: Any = None,
    pixel_values: Any = None,
    image_grid_thw: Any = None,
    pixel_values_videos: Any = None,
    video_grid_thw: Any = None,
    mm_token_type_ids: Any = None,
    moe_mm_token_type_ids: Any = None,
    advance: str = "reference",
) -> MultimodalInputs:
    """Check that tokens, patches and grids fit each other, work out positions, and spread the images over the devices.

    All but the tokens of a pure text stream must be values, not tracers: shapes depend on them.

    Args:
      vision: sizes and special tokens.
      inputs: checked tokens; their positions are used where no image is given.
      layout: mesh that the images are spread over.
      position_ids: [3, B, T] or [B, T]; worked out by default.
      pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw, mm_token_type_ids, moe_mm_token_type_ids: see
        `VisionLanguageModel.__call__`.
      advance: how positions go on behind a video, `reference` or `original`.

    Raises:
      ValueError: naming the argument, what it is and what it should be.
    """
    media = {
        IMAGE: _media("pixel_values", pixel_values, "image_grid_thw", image_grid_thw, vision),
        VIDEO: _media("pixel_values_videos", pixel_values_videos, "video_grid_thw", video_grid_thw, vision),
    }
    shape = tuple(inputs.input_ids.shape)
    modality = _types("moe_mm_token_type_ids", moe_mm_token_type_ids, shape)
    positions = inputs.position_ids if position_ids is None else _positions(position_ids, shape)
    if isinstance(inputs.input_ids, jax.core.Tracer):
        if media[IMAGE] or media[VIDEO]:
            raise ValueError("images inside jit: build the inputs outside with multimodal_inputs and pass them to model.forward")
        return MultimodalInputs(inputs.input_ids, inputs.segment_ids, positions, _array(modality))
    ids = np.asarray(inputs.input_ids)
    valid = np.asarray(inputs.segment_ids) != 0
    kinds = _types("mm_token_type_ids", mm_token_type_ids, shape)
    if kinds is None:
        kinds = np.select([ids == vision.image_token_id, ids == vision.video_token_id], [IMAGE, VIDEO], TEXT)
    if not isinstance(kinds, np.ndarray) or not (kinds[valid] != TEXT).any():
        _refuse_unused(media)
        return MultimodalInputs(inputs.input_ids, inputs.segment_ids, positions, _array(modality))
    merge = vision.spatial_merge_size
    image_grids, video_grids = (_grids(media[kind]) for kind in (IMAGE, VIDEO))
    rows = grids_of_rows(kinds, valid, image_grids, video_grids)
    _check_counts(kinds, valid, media, merge)
    if position_ids is None:
        three, _ = stream_positions(kinds, image_grids, video_grids, valid, merge_size=merge, advance=advance)
        positions = _positions(three, shape)
    if modality is None:
        _log.warning("moe_mm_token_type_ids is not given: image tokens go to the text experts, as in transformers")
    spread, patches, grouped = _spread(kinds, valid, rows, media, layout, merge)
    return MultimodalInputs(
        inputs.input_ids,
        inputs.segment_ids,
        positions,
        _array(modality),
        VisionInputs.of(spread, patches),
        jnp.asarray(_feature_ids(kinds, valid, spread)),
        grouped,
    )


class _Media:
    """Patches [N, C] of some images and their grids."""

    def __init__(self, patches: np.ndarray, grids: list[Grid]) -> None:
        self.grids = grids
        sizes = np.cumsum([int(np.prod(grid)) for grid in grids])
        self.patches = np.split(patches, sizes[:-1]) if grids else []


def _media(name: str, pixels: Any, grid_name: str, grids: Any, vision: VisionConfig) -> _Media | None:
    if pixels is None and grids is None:
        return None
    if pixels is None or grids is None:
        missing, given = (name, grid_name) if pixels is None else (grid_name, name)
        raise ValueError(f"{given} is given without {missing}; the patches and their grids belong together")
    if isinstance(pixels, jax.core.Tracer) or isinstance(grids, jax.core.Tracer):
        raise ValueError(f"{name} and {grid_name} must be values, not tracers; build the inputs outside jit (multimodal_inputs)")
    patches, table = np.asarray(pixels), np.asarray(grids)
    if table.ndim != 2 or table.shape[1] != 3 or not np.issubdtype(table.dtype, np.integer):
        raise ValueError(f"{grid_name} has shape {table.shape} and dtype {table.dtype}; expected integers [number, 3] (t, h, w)")
    checked = [check_grid(grid, vision.spatial_merge_size) for grid in table.tolist()]
    width = vision.in_channels * vision.patch_size**2
    count = int(table.prod(-1).sum())
    if patches.ndim != 2 or patches.shape != (count, width):
        raise ValueError(
            f"{grid_name} covers {count} patches, {name} has shape {patches.shape}; expected [{count}, {width}] "
            f"({vision.in_channels} channels x {vision.patch_size} x {vision.patch_size})"
        )
    return _Media(patches, checked)


def _types(name: str, values: Any, shape: tuple[int, ...]) -> Any:
    if values is None:
        return None
    values = values if isinstance(values, jax.Array) else np.asarray(values)
    if tuple(values.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(values.shape)}; expected {shape}, the shape of input_ids")
    if isinstance(values, jax.core.Tracer):
        return values
    array = np.asarray(values)
    if not np.isin(array, (TEXT, IMAGE, VIDEO)).all():
        raise ValueError(f"{name} spans {array.min()}..{array.max()}; expected 0 (text), 1 (image) or 2 (video)")
    return array.astype(np.int32)


def _positions(values: Any, shape: tuple[int, ...]) -> jax.Array:
    """[3, B, T] -> [B, T, 3]; [B, T] as it is."""
    if tuple(values.shape) not in (shape, (3, *shape)):
        raise ValueError(f"position_ids has shape {tuple(values.shape)}; expected {shape} or {(3, *shape)} (time, height, width)")
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise ValueError(f"position_ids has dtype {values.dtype}; expected integers")
    positions = jnp.asarray(values, jnp.int32)
    return jnp.moveaxis(positions, 0, -1) if positions.ndim == 3 else positions


def _array(values: Any) -> jax.Array | None:
    return None if values is None else jnp.asarray(values, jnp.int32)


def _grids(media: _Media | None) -> np.ndarray | None:
    return None if media is None else np.array(media.grids, np.int64)


def _refuse_unused(media: dict[int, _Media | None]) -> None:
    for kind, name in ((IMAGE, "image"), (VIDEO, "video")):
        given = media[kind]
        if given is not None and given.grids:
            raise ValueError(f"{len(given.grids)} {name}s are given, but input_ids have no {name} placeholders to put them in")


def _check_counts(kinds: np.ndarray, valid: np.ndarray, media: dict[int, _Media | None], merge: int) -> None:
    for kind, name in ((IMAGE, "image"), (VIDEO, "video")):
        given = media[kind]
        rows = sum(tokens_of_grid(grid, merge) for grid in given.grids) if given is not None else 0
        places = int(((kinds == kind) & valid).sum())
        if rows != places:
            raise ValueError(f"the {name} grids give {rows} feature rows, the tokens have {places} {name} placeholders")


def _spread(
    kinds: np.ndarray,
    valid: np.ndarray,
    rows: Sequence[Sequence[Grid]],
    media: dict[int, _Media | None],
    layout: Layout | None,
    merge: int,
) -> tuple[Spread, np.ndarray, bool]:
    """(the spread of all images in order of the rows, their patches in that order, whether images stay in their rows' groups)."""
    groups = 1 if layout is None else layout.axis_size(*BATCH_AXES)
    ranks = 1 if layout is None else layout.axis_size(*MODEL_AXES)
    grouped = len(kinds) % groups == 0
    grids = [grid for row in rows for grid in row]
    owner = [row * groups // len(kinds) for row, found in enumerate(rows) for _ in found]
    if grouped:
        spread = spread_images(grids, owner, num_groups=groups, ranks=ranks, merge_size=merge)
    else:
        whole = spread_images(grids, [0] * len(grids), num_groups=1, ranks=groups * ranks, merge_size=merge)

        def over_groups(array: np.ndarray) -> np.ndarray:
            return array.reshape(groups, ranks, *array.shape[2:])

        spread = replace(
            whole,
            source=over_groups(whole.source),
            segment_ids=over_groups(whole.segment_ids),
            position_ids=over_groups(whole.position_ids),
            pairs=over_groups(whole.pairs),
        )
    # The two lists hold images and videos apart; the rows tell in which order they are met.
    queues = {kind: iter(() if given is None else given.patches) for kind, given in media.items()}
    order = [kind for row in range(len(kinds)) for kind in _kinds_in_order(kinds[row][valid[row]])]
    return spread, np.concatenate([next(queues[kind]) for kind in order]), grouped


def _kinds_in_order(kinds: np.ndarray) -> list[int]:
    starts = np.flatnonzero(np.diff(kinds, prepend=TEXT) != 0)
    return [int(kind) for kind in kinds[starts] if kind != TEXT]


def _feature_ids(kinds: np.ndarray, valid: np.ndarray, spread: Spread) -> np.ndarray:
    out = np.full(kinds.shape, -1, np.int32)
    places = (kinds != TEXT) & valid
    # Row-major order of the batch is the order of the images.
    out[places] = np.concatenate(spread.rows)
    return out
