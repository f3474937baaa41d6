"""Records to documents: ids, labels, positions and patches. t tokens of a document, N patches, C values of a patch."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from ernie_jax.data.chat import ChatTemplate, Text, checked_messages, encode_chat
from ernie_jax.data.multimodal.records import MediaItem, Record
from ernie_jax.data.packing import IGNORE
from ernie_jax.data.shards import BadRecordError
from ernie_jax.data.tokenizer import Tokenizer
from ernie_jax.data.vision.geometry import tokens_of_grid
from ernie_jax.data.vision.image_processor import ImageProcessor
from ernie_jax.data.vision.patches import VisionPatches
from ernie_jax.data.vision.positions import ADVANCES, media_positions
from ernie_jax.data.vision.video_processor import VideoProcessor

TRAIN_ON = ("answers", "all")


@dataclass(frozen=True, eq=False)
class Document:
    """One document, ready to be packed.

    Attributes:
      input_ids: [t] int32.
      labels: [t] int32, the next token where it is trained, else -100; -100 at the last.
      placeholders: [t] bool, where a row of image or video features stands.
      modality_ids: [t] int32, 0 text, 1 image, 2 video, markers included.
      position_ids: [t, 3] int32, time, height, width.
      media: patches of the images and videos in order.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    placeholders: np.ndarray
    modality_ids: np.ndarray
    position_ids: np.ndarray
    media: tuple[VisionPatches, ...] = ()

    def __len__(self) -> int:
        return len(self.input_ids)

    @functools.cached_property
    def num_patches(self) -> int:
        """Patches of all its images and videos."""
        return sum(len(patches.pixel_values) for patches in self.media)


class DocumentEncoder:
    """Makes documents of records.

    A conversation is written by the template and ends as the template ends it. With `train_on` "answers" the labels are the
    assistant's words and the tokens that end them; with "all" they are every token but those of images and videos, neither
    placeholders nor the markers around them, which no model is asked to write. A text, whatever `train_on`, has a label at every
    token and the tokenizer's end token behind it, as in `make_pipeline`.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        image_processor: ImageProcessor,
        video_processor: VideoProcessor,
        train_on: str = "answers",
        advance: str = "reference",
    ) -> None:
        """Puts the parts together.

        Args:
          tokenizer: with the tokens of images and videos where there are any.
          template: of conversations, see `chat_template_of`.
          image_processor, video_processor: to patches; both with the patch and merge size of the model.
          train_on: `answers` or `all`.
          advance: how positions go on behind an image or video, see `media_positions`.

        Raises:
          ValueError: an unknown `train_on` or `advance`, or processors of different patch or merge sizes.
        """
        for name, value, known in (("train_on", train_on, TRAIN_ON), ("advance", advance, ADVANCES)):
            if value not in known:
                raise ValueError(f"{name} is {value!r}; expected one of {', '.join(known)}")
        sizes = [(processor.patch_size, processor.merge_size) for processor in (image_processor, video_processor)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"the image processor has patch_size and merge_size {sizes[0]}, the video processor {sizes[1]}; they must agree"
            )
        self.tokenizer = tokenizer
        self.merge_size = image_processor.merge_size
        self.patch_width = 3 * image_processor.patch_size**2
        self._template, self._train_on, self._advance = template, train_on, advance
        self._image_processor, self._video_processor = image_processor, video_processor

    @property
    def largest_unit(self) -> int | None:
        """Patches of the largest image, or pair of a video's frames, that the processors make; None where they do not resize."""
        processors = (self._image_processor, self._video_processor)
        if not all(processor.do_resize for processor in processors):
            return None
        image, frame = (processor.max_pixels // processor.patch_size**2 for processor in processors)
        return max(image, 2 * frame)

    def __call__(self, record: Record) -> Document | None:
        """The document, None for an empty one.

        Raises:
          BadRecordError: messages the template does not have, nothing to train on, or an image or video that cannot be read.
        """
        if record.text is not None:
            return self._text(record.text)
        try:
            return self._conversation(record)
        except ValueError as error:
            raise BadRecordError(f"{record.where}: {error}") from error

    def _text(self, text: str) -> Document | None:
        encoded = self.tokenizer.encode(text)
        if not len(encoded):
            return None
        ids = np.array([*encoded, self.tokenizer.eos_token_id], np.int32)
        nothing = np.zeros(len(ids), np.int32)
        positions = np.repeat(np.arange(len(ids), dtype=np.int32)[:, None], 3, axis=1)
        return Document(ids, _shifted(ids, np.ones(len(ids), np.bool_)), nothing != 0, nothing, positions)

    def _conversation(self, record: Record) -> Document:
        # Everything that can be refused by its words is refused before an image is decoded.
        if self._train_on == "answers" and not any(message["role"] == "assistant" for message in record.messages):
            raise ValueError("no message is the assistant's, so train_on='answers' has nothing to train on; add one, or use 'all'")
        media = tuple(self._patches(item) for item in record.media)
        chat = encode_chat(
            record.messages,
            self.tokenizer,
            self._template,
            add_generation_prompt=False,
            media_tokens=[tokens_of_grid(patches.grid_thw, self.merge_size) for patches in media],
        )
        kinds = tuple(item.kind for item in record.media)
        if chat.media_kinds != kinds:
            raise ValueError(f"the template places {chat.media_kinds}, the messages hold {kinds}; it must keep their order")
        ids, modality = chat.input_ids, chat.moe_mm_token_type_ids
        trained = chat.trained if self._train_on == "answers" else modality == 0
        grids = [patches.grid_thw for patches in media]
        positions = media_positions(chat.mm_token_type_ids, grids, merge_size=self.merge_size, advance=self._advance).T
        return Document(ids, _shifted(ids, trained), chat.mm_token_type_ids != 0, modality, np.ascontiguousarray(positions), media)

    def _patches(self, item: MediaItem) -> VisionPatches:
        try:
            return self._image_processor(item.source) if item.kind == "image" else self._video_processor(item.source)
        except OSError as error:
            raise ValueError(f"cannot read the {item.kind} {item.source!r}: {error}") from error

    def fingerprint(self) -> dict[str, Any]:
        """Everything here that decides the documents, as JSON-serialisable values."""
        probe = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        parts = self._template.parts(
            checked_messages(probe), add_generation_prompt=False, special_tokens=self.tokenizer.special_tokens.keys()
        )
        written = [[part.text, part.trained] for part in parts if isinstance(part, Text)]
        return {
            "tokenizer": self.tokenizer.fingerprint(),
            "template": f"{self._template.kind} {hashlib.sha256(json.dumps(written).encode()).hexdigest()[:16]}",
            "train_on": self._train_on,
            "advance": self._advance,
            "image_processor": _settings(self._image_processor),
            "video_processor": _settings(self._video_processor),
        }


def _settings(processor: ImageProcessor | VideoProcessor) -> dict[str, Any]:
    # Through JSON, as a saved fingerprint went: tuples become lists.
    settings: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(processor)))
    # The font is a path, which may differ from machine to machine.
    return settings | ({"font": settings["font"] is not None} if "font" in settings else {})


def _shifted(ids: np.ndarray, trained: np.ndarray) -> np.ndarray:
    labels = np.full(len(ids), IGNORE, np.int32)
    labels[:-1] = np.where(trained[1:], ids[1:], IGNORE)
    return labels
