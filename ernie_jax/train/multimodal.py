"""The data of a vision-language run: processors, template and shape of its batches, checked against the model."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

from ernie_jax.config.data import DataConfig
from ernie_jax.config.model import VisionConfig
from ernie_jax.config.run import RunConfig
from ernie_jax.data import (
    Corpus,
    Tokenizer,
    heldout_multimodal_batches,
    make_multimodal_pipeline,
    standard_library_corpus,
    train_tokenizer,
)
from ernie_jax.data.chat import MEDIA_TOKENS, MediaTokens, chat_template_of
from ernie_jax.data.digits import PAIR_QUESTION, QUESTIONS, DigitCorpus, digit_corpus
from ernie_jax.data.multimodal import BatchShape, DocumentEncoder
from ernie_jax.data.vision import ImageProcessor, VideoProcessor
from ernie_jax.sharding import Layout
from ernie_jax.train.run_data import TOKENIZER_CHARACTERS, RunData, texts_of, train_once

_DEFAULT_TEMPLATE = "vl"
_LONGEST_TEXT = 1000  # characters
# Of the built-in templates, behind the markers of images and videos.
_CHAT_TOKENS = ("<|begin_of_sentence|>", "<|end_of_sentence|>", "<think>", "</think>")


def made_digits(run: RunConfig, workdir: Path) -> DataConfig:
    """Questions about digits, the standard library's text, and a tokenizer of both, in the run's folder: the data as `multimodal`.

    Raises:
      ValueError: scikit-learn is not installed.
    """
    vision = run.model.vision
    assert vision is not None
    folder, short = workdir / "tokenizer", workdir / "corpus" / "short"

    def make() -> tuple[DigitCorpus, Corpus]:
        digits = digit_corpus(workdir / "digits", seed=run.seed)
        return digits, standard_library_corpus(workdir / "corpus", max_bytes=run.data.max_bytes)

    def shorten(texts: Corpus) -> None:
        # A table of a thousand lines would fill whole batches, without one image in them.
        short.mkdir(exist_ok=True)
        for path in (texts.train_path, texts.heldout_path):
            kept = (json.dumps({"text": text}) for text in texts_of(path) if len(text) <= _LONGEST_TEXT)
            (short / path.name).write_text("\n".join(kept) + "\n", encoding="utf-8")

    # One process makes the files, in the folder that all see.
    if jax.process_index() == 0:
        digits, texts = make()
        shorten(texts)

        def train(partial: Path) -> None:
            spoken = [*QUESTIONS, PAIR_QUESTION, "User: Picture 1: Picture 2: Assistant: 0 and 1"] * 100
            samples = itertools.chain(spoken, texts_of(texts.train_path, TOKENIZER_CHARACTERS))
            train_tokenizer(samples, run.model.vocab_size, partial, special_tokens=(*MEDIA_TOKENS, *_CHAT_TOKENS))
            sizes: dict[str, Any] = {"patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size}
            block = (vision.patch_size * vision.spatial_merge_size) ** 2
            ImageProcessor(**sizes, min_pixels=block, max_pixels=64 * block).save(partial)
            VideoProcessor(**sizes, min_pixels=block, max_pixels=64 * block).save(partial)

        if run.data.tokenizer is None:
            train_once(folder, train)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("ernie_jax digits")
        digits, texts = make()
    return dataclasses.replace(
        run.data,
        kind="multimodal",
        tokenizer=run.data.tokenizer or str(folder),
        paths=(str(digits.train_path),),
        text_paths=(str(short / "train.jsonl"),),
        eval_paths=(str(digits.heldout_path), str(short / "heldout.jsonl")),
    )


def open_multimodal(run: RunConfig, layout: Layout) -> RunData:
    """Tokenizer, this host's training batches, and its held-out batches.

    Raises:
      ValueError: files that are missing, or tokenizer, processors and sizes that are not the model's.
    """
    data, vision = run.data, run.model.vision
    assert data.tokenizer is not None
    assert vision is not None
    tokenizer = Tokenizer.from_folder(data.tokenizer)
    check_vocabulary(tokenizer, run)
    _check_media_tokens(tokenizer, vision)
    processors = _processors(data, vision)
    encoder = _encoder(data, vision, tokenizer, *processors)
    shared: dict[str, Any] = {
        "seq_len": run.seq_len,
        "shards": layout.shards("batch"),
        "ranks": layout.shards("image_devices"),
        "max_patches": data.max_patches,
        "process_index": jax.process_index(),
        "process_count": jax.process_count(),
    }
    options: dict[str, Any] = {
        "encoder": encoder,
        "format": data.format,
        "text_field": data.text_field,
        "packing": data.packing,
        "on_bad_record": data.on_bad_record,
    }
    weighted = [(list(data.paths), 1 - data.text_weight), (list(data.text_paths), data.text_weight)]
    batches = make_multimodal_pipeline(
        # Where one of the two has no files the other has all the weight.
        sources=[(paths, weight) for paths, weight in weighted if paths],
        shape=BatchShape(batch_size=run.batch_size, accumulate=run.parts, **shared),
        seed=run.seed,
        shuffle=data.shuffle,
        prefetch=data.prefetch,
        **options,
    )
    if not data.eval_paths:
        return RunData(tokenizer, batches, None, processors)
    # A held-out batch is as large as a microbatch: what fits in training fits here.
    shape = BatchShape(batch_size=run.batch_size // run.accumulate, accumulate=run.microbatches, **shared)
    held_out = heldout_multimodal_batches(paths=list(data.eval_paths), shape=shape, max_batches=run.eval.batches, **options)
    return RunData(tokenizer, batches, held_out, processors)


def check_vocabulary(tokenizer: Tokenizer, run: RunConfig) -> None:
    """ValueError where the tokenizer has more ids than the model has embeddings."""
    if tokenizer.vocab_size > run.model.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model {run.model.vocab_size} embeddings; "
            "raise config.model.vocab_size or use the model's own tokenizer (config.data.tokenizer)"
        )


def _check_media_tokens(tokenizer: Tokenizer, vision: VisionConfig) -> None:
    """The export names these ids; with others it would find no image in a prompt."""
    tokens = MediaTokens.of(tokenizer)
    found = {
        "image_token_id": tokens.image,
        "image_start_token_id": tokens.image_start,
        "image_end_token_id": tokens.image_end,
        "video_start_token_id": tokens.video_start,
        "video_end_token_id": tokens.video_end,
    }
    # Where the tokenizer has no video placeholder the model's id is never seen.
    found |= {"video_token_id": tokens.video} if tokens.video != tokens.image else {}
    wrong = {name: index for name, index in found.items() if getattr(vision, name) != index}
    if wrong:
        listed = ", ".join(f"{name}={getattr(vision, name)} (tokenizer {index})" for name, index in wrong.items())
        raise ValueError(
            f"config.model.vision has other ids than the tokenizer: {listed}; set them to the tokenizer's, or use the model's own "
            "tokenizer (config.data.tokenizer)"
        )


def _processors(data: DataConfig, vision: VisionConfig) -> tuple[ImageProcessor, VideoProcessor]:
    assert data.tokenizer is not None
    if vision.in_channels != 3:
        raise ValueError(f"config.model.vision.in_channels={vision.in_channels}; images are read with 3 channels")
    bounds = {name: getattr(data, name) for name in ("min_pixels", "max_pixels") if getattr(data, name) is not None}
    image = ImageProcessor.from_folder(data.tokenizer, **bounds)
    video = VideoProcessor.from_folder(data.tokenizer)
    for processor in (image, video):
        sizes = {"patch_size": processor.patch_size, "merge_size": processor.merge_size}
        expected = {"patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size}
        if sizes != expected:
            raise ValueError(
                f"the {type(processor).__name__} of {data.tokenizer} has {sizes}, the model {expected}; save a processor with the "
                "model's sizes in that folder"
            )
    return image, video


def _encoder(
    data: DataConfig, vision: VisionConfig, tokenizer: Tokenizer, image: ImageProcessor, video: VideoProcessor
) -> DocumentEncoder:
    automatic = data.template == "auto"
    template = chat_template_of(data.tokenizer if automatic else None, _DEFAULT_TEMPLATE if automatic else data.template)
    return DocumentEncoder(
        tokenizer=tokenizer,
        template=template,
        image_processor=image,
        video_processor=video,
        train_on=data.train_on,
        advance=vision.position_advance,
    )
