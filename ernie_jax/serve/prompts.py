"""Prompts of token ids, alone or with images and videos, checked and padded to one batch. B rows, P prompt tokens after padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

import numpy as np

from ernie_jax.config.model import ModelConfig, VisionConfig
from ernie_jax.data.chat import EncodedChat
from ernie_jax.data.vision import VisionPatches
from ernie_jax.data.vision.patches import KINDS
from ernie_jax.data.vision.positions import media_positions
from ernie_jax.models import MultimodalInputs, TextInputs, multimodal_inputs
from ernie_jax.sharding import Layout

# Prompts are padded to a multiple of this, so that prompts of similar length share one compiled program.
PROMPT_MULTIPLE = 16


@dataclass(frozen=True, eq=False)
class MultimodalPrompt:
    """Token ids with the images and videos among them. T tokens.

    Attributes:
      input_ids: [T].
      mm_token_type_ids: [T], 1 on image and 2 on video placeholders, 0 elsewhere; a run is one image or video.
      moe_mm_token_type_ids: [T], the same and also 1 or 2 on start and end markers: who goes to the vision experts.
      patches: of each image and video, in order of appearance.
    """

    input_ids: Sequence[int] | np.ndarray
    mm_token_type_ids: Sequence[int] | np.ndarray
    moe_mm_token_type_ids: Sequence[int] | np.ndarray
    patches: tuple[VisionPatches, ...] = ()

    @classmethod
    def of_chat(cls, chat: EncodedChat, patches: Sequence[VisionPatches] = ()) -> Self:
        """An encoded chat and its images and videos in order of appearance."""
        return cls(chat.input_ids, chat.mm_token_type_ids, chat.moe_mm_token_type_ids, tuple(patches))


Prompt: TypeAlias = Sequence[int] | MultimodalPrompt


@dataclass(frozen=True, eq=False)
class CheckedPrompt:
    """One row of a batch: its ids, and its token types and patches, which are all zero and none for text alone."""

    ids: list[int]
    placeholders: np.ndarray
    routed: np.ndarray
    patches: tuple[VisionPatches, ...]

    @property
    def is_text(self) -> bool:
        """Whether no token goes to the vision experts and none stands for an image."""
        return not self.patches and not self.routed.any()


def checked_prompts(config: ModelConfig, prompts: Sequence[Prompt]) -> list[CheckedPrompt]:
    """The rows of a batch.

    Raises:
      ValueError: no prompts, an empty one, ids outside the vocabulary; images for a text model, token types of another shape,
        patches that do not fit the placeholders. The prompt is named by its index from 0.
    """
    if not prompts:
        raise ValueError("no prompts; give at least one list of token ids")
    rows = [_checked(config, i, prompt) for i, prompt in enumerate(prompts)]
    for i, row in enumerate(rows):
        if row.is_text:
            continue
        if config.vision is None:
            raise ValueError(f"prompt {i} has images or videos, and this is a text model; use a vision-language model")
        try:
            _check_patches(config.vision, row)
        except ValueError as error:
            raise ValueError(f"prompt {i}: {error}") from error
    return rows


def _checked(config: ModelConfig, i: int, prompt: Prompt) -> CheckedPrompt:
    ids = [int(token) for token in (prompt.input_ids if isinstance(prompt, MultimodalPrompt) else prompt)]
    if not ids:
        raise ValueError(f"prompt {i} is empty; give at least one token (the begin token {config.bos_token_id}, for example)")
    bad = [token for token in ids if not 0 <= token < config.vocab_size]
    if bad:
        raise ValueError(f"prompt {i} has token id {bad[0]}; expected ids in 0..{config.vocab_size - 1}")
    if not isinstance(prompt, MultimodalPrompt):
        return CheckedPrompt(ids, np.zeros(len(ids), np.int32), np.zeros(len(ids), np.int32), ())
    types = []
    for name in ("mm_token_type_ids", "moe_mm_token_type_ids"):
        values = np.asarray(getattr(prompt, name))
        if values.shape != (len(ids),):
            raise ValueError(f"prompt {i}: {name} has shape {values.shape}; expected {(len(ids),)}, one for each token")
        if not np.isin(values, (0, 1, 2)).all():
            raise ValueError(f"prompt {i}: {name} spans {values.min()}..{values.max()}; expected 0 (text), 1 (image) or 2 (video)")
        types.append(values.astype(np.int32))
    if types[0].any() and not prompt.patches:
        raise ValueError(f"prompt {i} has {int((types[0] != 0).sum())} placeholders of images and videos, but no patches")
    return CheckedPrompt(ids, types[0], types[1], tuple(prompt.patches))


def _check_patches(vision: VisionConfig, row: CheckedPrompt) -> None:
    starts = np.flatnonzero(np.diff(row.placeholders, prepend=0))
    wanted = [KINDS[kind - 1] for kind in row.placeholders[starts] if kind]
    given = [patches.kind for patches in row.patches]
    if wanted != given:
        raise ValueError(
            f"the tokens have placeholders for {wanted or 'no images'}, patches are given of {given or 'none'}; give one for each "
            "run of placeholders, in order of appearance"
        )
    width = vision.in_channels * vision.patch_size**2
    for number, patches in enumerate(row.patches):
        if patches.pixel_values.shape[1] != width:
            raise ValueError(
                f"{patches.kind} {number} has patches of {patches.pixel_values.shape[1]} values; this model takes {width} "
                f"({vision.in_channels} channels x {vision.patch_size} x {vision.patch_size})"
            )
    grids = [patches.grid_thw for patches in row.patches]
    media_positions(row.placeholders, grids, merge_size=vision.spatial_merge_size, advance=vision.position_advance)


def padded(
    rows: Sequence[CheckedPrompt], vision: VisionConfig | None, layout: Layout | None
) -> tuple[np.ndarray, np.ndarray] | MultimodalInputs:
    """The rows side by side, padded on the left to a multiple of `PROMPT_MULTIPLE`.

    Returns:
      Of text alone (ids [B, P], segment ids [B, P]); where any row has images the model's inputs, images spread over the mesh.
    """
    width = -(-max(len(row.ids) for row in rows) // PROMPT_MULTIPLE) * PROMPT_MULTIPLE
    ids = _on_the_right([row.ids for row in rows], width)
    segments = _on_the_right([np.ones(len(row.ids)) for row in rows], width)
    if all(row.is_text for row in rows):
        return ids, segments
    assert vision is not None
    positions = np.maximum(np.cumsum(segments, axis=1) - 1, 0).astype(np.int32)
    images, videos = ([p for row in rows for p in row.patches if p.kind == kind] for kind in KINDS)
    pixel_values, image_grids = _joined(images)
    pixel_values_videos, video_grids = _joined(videos)
    return multimodal_inputs(
        vision,
        # Outside a compiled function arrays of either kind will do.
        TextInputs(ids, segments, positions),  # type: ignore[arg-type]
        layout,
        pixel_values=pixel_values,
        image_grid_thw=image_grids,
        pixel_values_videos=pixel_values_videos,
        video_grid_thw=video_grids,
        mm_token_type_ids=_on_the_right([row.placeholders for row in rows], width),
        moe_mm_token_type_ids=_on_the_right([row.routed for row in rows], width),
        advance=vision.position_advance,
    )


def _on_the_right(rows: Sequence[Sequence[int] | np.ndarray], width: int) -> np.ndarray:
    """[B, P] int32, zero where a row has nothing."""
    out = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        out[i, width - len(row) :] = row
    return out


def _joined(patches: Sequence[VisionPatches]) -> tuple[np.ndarray | None, np.ndarray | None]:
    """(patches of all [N, C], grids [number, 3]), None for none."""
    if not patches:
        return None, None
    return np.concatenate([p.pixel_values for p in patches]), np.array([p.grid_thw for p in patches], np.int64)
