"""Arrays of a batch, taken apart again: every image where its tokens say, positions, isolation, labels, balance."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from ernie_jax.data import IGNORE, heldout_multimodal_batches, make_pipeline
from ernie_jax.data.chat import MediaTokens
from ernie_jax.data.multimodal import BatchShape
from ernie_jax.data.vision.positions import media_positions
from ernie_jax.models.batches import MULTIMODAL_KEYS, PATCH_KEYS, TEXT_KEYS
from ernie_jax.train.gradients import split_microbatches

SPREADS = [{}, {"shards": 2}, {"shards": 2, "accumulate": 2, "ranks": 4}, {"ranks": 3, "accumulate": 4}]


def documents_of(batch):
    """(row, slice) of each document or piece."""
    for row, segments in enumerate(batch["segment_ids"]):
        for segment in range(1, segments.max() + 1):
            places = np.flatnonzero(segments == segment)
            assert np.array_equal(places, np.arange(places[0], places[-1] + 1))
            yield row, slice(int(places[0]), int(places[-1]) + 1)


def group_of_row(row, rows, shards, accumulate):
    return row // (rows // shards) * accumulate + row % accumulate


def patches_of_features(batch, group, features):
    """The merged rows [tokens, 2, 4, C] that make the features with these numbers in a group."""
    pixels, pairs = batch["pixel_values"][group], batch["patch_pairs"][group]
    size = pairs.shape[1]
    return np.stack([pixels[f // size].reshape(-1, 4, pixels.shape[-1])[pairs[f // size, f % size]] for f in features])


@pytest.mark.parametrize("spread", SPREADS, ids=str)
def test_shapes_and_types(make_data, spread):
    rows, shards, accumulate, ranks = 8, spread.get("shards", 1), spread.get("accumulate", 1), spread.get("ranks", 1)
    with make_data(**spread, batch_size=rows, max_patches=2048) as data:
        for _ in range(3):
            batch = next(data)
            assert set(batch) == {*MULTIMODAL_KEYS, "imbalance", "naive_imbalance"}
            groups = shards * accumulate
            for key in MULTIMODAL_KEYS:
                assert batch[key].dtype == (np.float32 if key == "pixel_values" else np.int32)
                expected = (groups, ranks) if key in PATCH_KEYS else (rows, 160)
                assert batch[key].shape[:2] == expected
            assert batch["position_ids"].shape[2:] == (3,)
            assert batch["pixel_values"].shape[2:] == (2048, 48)
            assert batch["patch_segment_ids"].shape[2:] == (2048,)
            assert batch["patch_position_ids"].shape[2:] == (2048, 2)
            assert batch["patch_pairs"].shape[2:] == (512, 2)
            assert 1 <= batch["imbalance"] <= batch["naive_imbalance"]
            assert batch["imbalance"].dtype == np.float32


@pytest.mark.parametrize("spread", SPREADS, ids=str)
def test_every_image_is_found_where_its_tokens_say(make_data, files, tokenizer, processor, make_encoder, spread):
    media = MediaTokens.of(tokenizer)
    records = [json.loads(line) for line in (files / "chats.jsonl").read_text().splitlines()]
    known = {}
    for record in records:
        for item in record["messages"][0]["content"] if "messages" in record else ():
            if isinstance(item, dict) and item["type"] == "image":
                patches = processor(str(files / item["image"]))
                known[patches.pixel_values.tobytes()] = patches.grid_thw
    seen = set()
    rows, shards, accumulate = 8, spread.get("shards", 1), spread.get("accumulate", 1)
    with make_data(**spread, batch_size=rows) as data:
        for _ in range(6):
            batch = next(data)
            used = {group: [] for group in range(shards * accumulate)}
            for row, at in documents_of(batch):
                ids, features = batch["input_ids"][row, at], batch["feature_ids"][row, at]
                group = group_of_row(row, rows, shards, accumulate)
                np.testing.assert_array_equal(features >= 0, np.isin(ids, [media.image, media.video]))
                assert batch["document_kinds"][row, at].tolist() == [int((features >= 0).any())] * len(ids)
                starts = np.flatnonzero(np.isin(ids, [media.image_start, media.video_start]))
                stops = np.flatnonzero(np.isin(ids, [media.image_end, media.video_end]))
                kinds, grids = np.where(ids == media.image, 1, np.where(ids == media.video, 2, 0)), []
                routed = kinds.copy()
                for start, stop in zip(starts, stops, strict=True):
                    numbers = features[start + 1 : stop]
                    used[group] += numbers.tolist()
                    merged = patches_of_features(batch, group, numbers)
                    first = merged[:, 0].reshape(-1, 48)
                    routed[[start, stop]] = routed[start + 1]
                    if ids[start] == media.image_start:
                        np.testing.assert_array_equal(merged[:, 0], merged[:, 1])
                        grids.append(known[first.tobytes()])  # exactly an image of the files, patch by patch
                        seen.add(first.tobytes())
                    else:
                        grids.append((4, 6, 10) if len(numbers) == 30 else (2, 6, 10))
                        # Frames of 24 x 40 pixels: six by ten patches.
                        assert len(numbers) in (15, 30)
                expected = media_positions(kinds, grids, merge_size=2)
                np.testing.assert_array_equal(batch["position_ids"][row, at].T, expected)
                np.testing.assert_array_equal(batch["modality_ids"][row, at], routed)
            for numbers in used.values():
                assert len(set(numbers)) == len(numbers), "no two tokens share a row of features"
            padding = batch["segment_ids"] == 0
            assert (batch["labels"][padding] == IGNORE).all()
            assert (batch["feature_ids"][padding] == -1).all()
            assert not batch["pixel_values"][batch["patch_segment_ids"] == 0].any()
    assert seen == set(known)


def test_frames_of_a_video_are_paired(make_data, files, tokenizer, make_encoder):
    """The film of four frames: token i of pair j has patch block i of frames 2j and 2j + 1."""
    whole = make_encoder()._video_processor(str(files / "frames"))
    assert whole.grid_thw == (4, 6, 10)
    frames = whole.pixel_values.reshape(2, 2, 15, 4, 48)
    video = MediaTokens.of(tokenizer).video
    with make_data(shards=2, ranks=2) as data:
        for _ in range(30):
            batch = next(data)
            for row, at in documents_of(batch):
                features = batch["feature_ids"][row, at][batch["input_ids"][row, at] == video]
                if len(features) == 30:
                    merged = patches_of_features(batch, group_of_row(row, 4, 2, 1), features)
                    np.testing.assert_array_equal(merged, frames.transpose(0, 2, 1, 3, 4).reshape(30, 2, 4, 48))
                    return
    raise AssertionError("the film never came")


@pytest.mark.parametrize(("rows", "shards", "accumulate"), [(8, 2, 2), (12, 3, 2), (8, 1, 4), (6, 6, 1)])
def test_groups_of_rows_are_those_of_split_microbatches(rows, shards, accumulate):
    """Rows and groups that carry their group's number go through the split of the training step together."""
    shape = BatchShape(seq_len=4, batch_size=rows, shards=shards, accumulate=accumulate)
    batch = {
        "input_ids": jnp.asarray(shape.group_of_rows())[:, None].repeat(4, 1),
        "pixel_values": jnp.arange(shape.groups)[:, None, None, None],
    }
    split = split_microbatches(batch, accumulate)
    assert split["pixel_values"].shape[:2] == (accumulate, shards)
    for ids, groups in zip(split["input_ids"], split["pixel_values"], strict=True):
        of_shard = np.asarray(ids[:, 0]).reshape(shards, -1)
        np.testing.assert_array_equal(of_shard, np.asarray(groups).reshape(shards, 1).repeat(of_shard.shape[1], 1))


def test_labels_are_the_answers_and_the_tokens_that_end_them(make_data, tokenizer, files):
    with make_data(sources=[(str(files / "chats.jsonl"), 1)], seq_len=400) as data:
        batches = [next(data) for _ in range(6)]
    answers = set()
    for batch in batches:
        for row, at in documents_of(batch):
            ids, labels = batch["input_ids"][row, at], batch["labels"][row, at]
            scored = labels != IGNORE
            np.testing.assert_array_equal(labels[:-1][scored[:-1]], ids[1:][scored[:-1]])
            if batch["document_kinds"][row, at][0]:
                assert labels[-1] == IGNORE
                assert ids[-1] == labels[scored][-1] == tokenizer.token_id("<|end_of_sentence|>")
                answers.add(tokenizer.decode(labels[scored][:-1]))
    assert answers == {f"the square {i}" for i in range(20)} | {"blue squares", "blue"}


def test_all_trains_every_token_but_those_of_images(make_data):
    with make_data(train_on="all", seq_len=400) as data:
        batch = next(data)
    assert batch["modality_ids"].any()
    for row, at in documents_of(batch):
        ids, modality = batch["input_ids"][row, at], batch["modality_ids"][row, at]
        expected = np.where(modality[1:] == 0, ids[1:], IGNORE)
        np.testing.assert_array_equal(batch["labels"][row, at][:-1], expected)


def test_no_label_crosses_documents_and_no_document_with_images_is_cut(make_data, tokenizer):
    begin, end = (tokenizer.token_id(name) for name in ("<|begin_of_sentence|>", "<|end_of_sentence|>"))
    with make_data(train_on="all") as data:
        for _ in range(10):
            batch = next(data)
            for row, at in documents_of(batch):
                ids = batch["input_ids"][row, at]
                if batch["document_kinds"][row, at].any():
                    assert (ids[0], ids[-1]) == (begin, end)
                if ids[-1] in (end, tokenizer.eos_token_id):
                    assert batch["labels"][row, at][-1] == IGNORE
                else:
                    assert at.stop == 160, "only the end of a row cuts a text"
                    assert batch["labels"][row, at][-1] != IGNORE


def test_texts_alone_are_the_rows_of_the_text_pipeline(make_data, tokenizer, files):
    paths = [str(files / "texts.jsonl"), str(files / "book.txt")]
    text = make_pipeline(paths=paths, tokenizer=tokenizer, seq_len=50, batch_size=4, seed=3)
    with text, make_data(sources=[(paths, 1)], seq_len=50) as data:
        for _ in range(12):
            batch, expected = next(data), next(text)
            for key in TEXT_KEYS:
                got = batch[key] if key != "position_ids" else batch[key][..., 1]
                np.testing.assert_array_equal(got, expected[key], err_msg=key)
            assert batch["pixel_values"].shape[:3] == (1, 1, 4)
            assert not batch["pixel_values"].any()
            assert (batch["feature_ids"] == -1).all()
            assert (batch["imbalance"], batch["naive_imbalance"]) == (1, 1)


def test_rows_are_filled_well(make_data):
    with make_data(batch_size=16, seq_len=256) as data:
        shares = [(next(data)["segment_ids"] > 0).mean() for _ in range(5)]
    assert min(shares) > 0.97


def test_rows_and_images_are_spread_more_evenly_than_the_naive_split(make_data):
    with make_data(batch_size=32, shards=4, ranks=2) as data:
        figures = np.array([(batch["imbalance"], batch["naive_imbalance"]) for batch in (next(data) for _ in range(5))])
    assert figures[:, 0].max() < 1.1
    assert figures[:, 1].mean() > 1.3


def test_the_imbalance_is_counted_from_the_arrays(make_data):
    with make_data(batch_size=8, shards=2, accumulate=2, ranks=2) as data:
        batch = next(data)
    patches = (batch["patch_segment_ids"] > 0).sum(-1)
    assert patches.shape == (4, 2)
    assert batch["imbalance"] == pytest.approx(patches.max() / patches.mean(), rel=1e-6)


def with_images(batch):
    return {batch["input_ids"][row, at].tobytes() for row, at in documents_of(batch) if batch["document_kinds"][row, at].any()}


@pytest.mark.parametrize(("spread", "max_patches", "waits"), [({"shards": 4, "ranks": 2}, 320, False), ({}, 512, True)])
def test_max_patches_bounds_every_device_and_what_goes_beyond_waits(make_data, files, spread, max_patches, waits):
    """All 22 documents with images still come; rows of padding stand where one waits for the next batch."""
    changes = {"batch_size": 8, "seq_len": 256, "sources": [(str(files / "chats.jsonl"), 1)], **spread}
    seen, free_seen, empty, fullest = set(), set(), 0, 0
    with make_data(**changes, max_patches=max_patches) as data, make_data(**changes) as free:
        for _ in range(30):
            batch, unlimited = next(data), next(free)
            assert batch["pixel_values"].shape[2] == max_patches
            empty += (batch["segment_ids"] == 0).all(1).sum()
            fullest = max(fullest, (unlimited["patch_segment_ids"] > 0).sum(-1).max())
            seen |= with_images(batch)
            free_seen |= with_images(unlimited)
    assert fullest > max_patches, "without a limit there would be more"
    assert seen == free_seen
    assert len(seen) == 22
    assert (empty > 0) == waits


def test_hosts_share_the_batch_and_the_held_out_rows(files, make_encoder):
    paths = [str(files / "chats.jsonl"), str(files / "texts.jsonl")]
    sizes = {"seq_len": 320, "batch_size": 4, "shards": 4, "max_patches": 2048}
    arguments = {"paths": paths, "encoder": make_encoder(), "max_batches": None}
    whole = list(heldout_multimodal_batches(**arguments, shape=BatchShape(**sizes)))
    parts = [
        list(heldout_multimodal_batches(**arguments, shape=BatchShape(**sizes, process_index=index, process_count=2)))
        for index in range(2)
    ]
    assert len(whole) == len(parts[0]) == len(parts[1]) > 1
    for batch, first, second in zip(whole, *parts, strict=True):
        rows = [sorted(ids.tobytes() for ids in rows) for rows in (batch["input_ids"], [*first["input_ids"], *second["input_ids"]])]
        assert rows[0] == rows[1]
        assert first["pixel_values"].shape == (2, 1, 2048, 48)
    again = list(heldout_multimodal_batches(**arguments | {"max_batches": 2}, shape=BatchShape(**sizes)))
    assert len(again) == 2
    assert all(np.array_equal(again[1][key], whole[1][key]) for key in whole[1])
    scored = sum((batch["labels"] != IGNORE).sum() for batch in whole)
    assert scored > 0
    # Every record once: 23 conversations begin with their own token, texts end with theirs.
    ends = sum((batch["input_ids"] == make_encoder().tokenizer.eos_token_id).sum() for batch in whole)
    assert ends == 1 + 15
    begins = sum((batch["input_ids"] == make_encoder().tokenizer.token_id("<|begin_of_sentence|>")).sum() for batch in whole)
    assert begins == 23


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": 1}, "seq_len is 1"),
        ({"ranks": 0}, "ranks is 0"),
        ({"batch_size": 6, "shards": 2, "accumulate": 2}, "batch_size 6 does not divide into accumulate=2"),
        ({"batch_size": 4, "process_count": 2, "max_patches": 64}, "1 batch shards do not divide among 2 processes"),
        ({"batch_size": 4, "process_count": 2, "shards": 2}, "max_patches is not set"),
        ({"max_patches": 10}, "expected a positive multiple of merge_size"),
        ({"packing": "tight"}, "packing is 'tight'"),
        ({"prefetch": -1}, "prefetch is -1"),
        ({"sources": []}, "no sources are given"),
        ({"train_on": "questions"}, "train_on is 'questions'"),
        ({"advance": "fast"}, "advance is 'fast'"),
    ],
)
def test_arguments_that_are_refused_before_any_work(make_data, changes, message):
    with pytest.raises(ValueError, match=message):
        make_data(**changes)
