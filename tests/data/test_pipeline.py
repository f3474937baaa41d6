import gc
import hashlib
import json
import threading

import numpy as np
import pytest

from ernie_jax.data import make_pipeline, train_tokenizer

TEXTS = [f"record {i}: " + "".join(f"x{i} + y{j} " for j in range(i % 6)) for i in range(23)]


@pytest.fixture
def arguments(tokenizer, write_jsonl):
    """Two files of records, some longer than a row and none filling rows evenly."""
    paths = [write_jsonl("a.jsonl", TEXTS[:10]), write_jsonl("b.jsonl", TEXTS[10:])]
    return {"paths": paths, "tokenizer": tokenizer, "seq_len": 24, "batch_size": 4, "seed": 7}


def digest(batch):
    return hashlib.sha256(b"".join(key.encode() + batch[key].tobytes() for key in sorted(batch))).hexdigest()


def take(iterator, count):
    return [digest(next(iterator)) for _ in range(count)]


def documents_of(batches, eos=2):
    """Documents in the order in which they stand in the batches."""
    tokens = np.concatenate([batch["input_ids"][batch["segment_ids"] > 0] for batch in batches]).tolist()
    documents, start = [], 0
    for stop, token in enumerate(tokens, start=1):
        if token == eos:
            documents.append(tokens[start : stop - 1])
            start = stop
    return documents


def test_batches_have_the_promised_arrays(arguments):
    with make_pipeline(**arguments) as iterator:
        batch = next(iterator)
    assert {key: (value.shape, value.dtype) for key, value in batch.items()} == dict.fromkeys(
        ("input_ids", "labels", "segment_ids", "position_ids"), ((4, 24), np.dtype(np.int32))
    )


@pytest.mark.parametrize("prefetch", [0, 3])
def test_stopping_three_times_gives_the_batches_of_a_straight_run(arguments, prefetch):
    arguments |= {"seq_len": 14, "batch_size": 2}
    with make_pipeline(**arguments, prefetch=2) as iterator:
        straight = take(iterator, 40)
    assert len(set(straight)) == 40
    epoch_batches = sum(len(arguments["tokenizer"].encode(text)) + 1 for text in TEXTS) / (2 * 14)
    stops = (7, 19, 30, 40)
    assert stops[1] < epoch_batches < stops[2] < 2 * epoch_batches, "the third stop lies inside epoch 2"
    resumed, state, half_filled = [], None, []
    for stop in stops:
        with make_pipeline(**arguments, prefetch=prefetch) as iterator:
            if state is not None:
                iterator.set_state(json.loads(state))
            resumed += take(iterator, stop - len(resumed))
            state = json.dumps(iterator.get_state())
        half_filled.append(json.loads(state)["position"]["packer"])
    assert resumed == straight
    # A stop inside a document leaves the rest of it in the packing buffer.
    assert any(packer["rest"] for packer in half_filled)


@pytest.mark.parametrize("packing", ["greedy", "none"])
def test_every_position_of_two_epochs_can_be_continued_from(arguments, packing):
    arguments |= {"packing": packing, "prefetch": 0}
    with make_pipeline(**arguments) as iterator, make_pipeline(**arguments) as second:
        states, digests = [iterator.get_state()], []
        for _ in range(30):
            digests += take(iterator, 1)
            states.append(iterator.get_state())
        packers = [state["position"]["packer"] for state in states]
        if packing == "greedy":
            assert any(packer["rest"] for packer in packers)
        for place in range(0, 29, 2):
            second.set_state(states[place])
            assert take(second, 2) == digests[place : place + 2]


def test_a_document_of_many_batches_is_continued_inside_and_at_the_end_of_the_data(tokenizer, write_jsonl):
    path = write_jsonl("a.jsonl", ["word " * 300])
    arguments = {"paths": path, "tokenizer": tokenizer, "seq_len": 16, "batch_size": 2, "seed": 0, "epochs": 1}
    with make_pipeline(**arguments) as iterator:
        straight = [digest(batch) for batch in iterator]
    assert len(straight) > 8
    for stop in (1, 5, len(straight) - 1, len(straight)):
        with make_pipeline(**arguments) as iterator:
            take(iterator, stop)
            state = json.loads(json.dumps(iterator.get_state()))
        with make_pipeline(**arguments) as iterator:
            iterator.set_state(state)
            assert [digest(batch) for batch in iterator] == straight[stop:]


def test_prefetched_batches_are_neither_lost_nor_part_of_the_state(arguments):
    with make_pipeline(**arguments, prefetch=4) as ahead, make_pipeline(**arguments, prefetch=0) as plain:
        expected = take(plain, 8)
        assert take(ahead, 3) == expected[:3]
        state = ahead.get_state()
        assert take(ahead, 5) == expected[3:]
        ahead.set_state(state)
        assert take(ahead, 5) == expected[3:]
        plain.set_state(state)
        assert take(plain, 5) == expected[3:]


def test_state_before_the_first_batch_and_after_closing(arguments):
    with make_pipeline(**arguments) as iterator:
        start = iterator.get_state()
        first = take(iterator, 5)
        iterator.set_state(start)
        assert take(iterator, 2) == first[:2]
    after = iterator.get_state()
    assert iterator.skipped_records == 0
    with make_pipeline(**arguments) as second:
        second.set_state(after)
        assert take(second, 3) == first[2:]
    with pytest.raises(ValueError, match="closed"):
        next(iterator)
    with pytest.raises(ValueError, match="closed"):
        iterator.set_state(after)


def test_each_epoch_has_every_document_once_in_a_new_order(arguments):
    expected = [arguments["tokenizer"].encode(text) for text in TEXTS]
    with make_pipeline(**arguments, epochs=3) as iterator:
        documents = documents_of(list(iterator))
    epochs = [documents[start : start + len(TEXTS)] for start in range(0, len(documents), len(TEXTS))]
    assert len(epochs) == 3
    assert all(sorted(epoch) == sorted(expected) for epoch in epochs)
    assert len({str(epoch) for epoch in [*epochs, expected]}) == 4
    with make_pipeline(**arguments, epochs=1, shuffle=False) as iterator:
        assert documents_of(list(iterator)) == expected


def test_hosts_together_read_every_document_once_an_epoch(arguments):
    alone = make_pipeline(**arguments, epochs=1)
    order = documents_of(list(alone))
    alone.close()
    for host in range(2):
        with make_pipeline(**arguments, epochs=1, process_index=host, process_count=2) as iterator:
            batches = list(iterator)
        assert {batch["input_ids"].shape for batch in batches} == {(2, 24)}
        assert documents_of(batches) == order[host::2]


def test_last_batch_of_finite_epochs_is_filled_with_rows_without_labels(tokenizer, write_jsonl):
    path = write_jsonl("a.jsonl", ["one"])
    with make_pipeline(paths=path, tokenizer=tokenizer, seq_len=16, batch_size=3, seed=0, epochs=1) as iterator:
        (batch,) = iterator
    assert np.all(batch["labels"][1:] == -100)
    assert documents_of([batch]) == [tokenizer.encode("one")]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_bad_record_stops_with_file_and_line_and_stays_stopped(arguments, tmp_path, prefetch):
    (tmp_path / "c.jsonl").write_text('{"text": "good"}\n{"txt": "bad"}\n')
    arguments["paths"] = [*arguments["paths"], str(tmp_path / "c.jsonl")]
    with make_pipeline(**arguments, prefetch=prefetch) as iterator:
        # A further call must not go on behind the record that failed.
        for count in (40, 1, 1):
            with pytest.raises(ValueError, match=r"c\.jsonl, line 2: no field 'text'.*on_bad_record='skip'"):
                take(iterator, count)


def test_bad_records_are_skipped_and_counted_and_the_count_resumes(arguments, tmp_path):
    (tmp_path / "c.jsonl").write_text('{"text": "good"}\nbad\n{"text": 3}\n{"text": ""}\n')
    arguments["paths"] = [*arguments["paths"], str(tmp_path / "c.jsonl")]
    arguments |= {"on_bad_record": "skip", "epochs": 3}
    expected = sorted(arguments["tokenizer"].encode(text) for text in [*TEXTS, "good"] * 3)
    with make_pipeline(**arguments) as iterator:
        assert iterator.skipped_records == 0
        batches = [next(iterator) for _ in range(9)]
        state = json.loads(json.dumps(iterator.get_state()))
        before = iterator.skipped_records
    with make_pipeline(**arguments) as iterator:
        iterator.set_state(state)
        assert iterator.skipped_records == before
        batches += list(iterator)
        # Two bad ones an epoch; the empty document is not bad.
        assert iterator.skipped_records == 6
    assert sorted(documents_of(batches)) == expected


@pytest.mark.parametrize("epochs", [None, 1, 3])
@pytest.mark.parametrize("line", ["bad", '{"text": ""}'])
def test_data_without_any_token_is_an_error_and_no_endless_loop(tokenizer, tmp_path, line, epochs):
    (tmp_path / "a.jsonl").write_text(f"{line}\n" * 5)
    with (
        make_pipeline(
            paths=tmp_path / "a.jsonl", tokenizer=tokenizer, seq_len=8, batch_size=1, seed=0, on_bad_record="skip", epochs=epochs
        ) as iterator,
        pytest.raises(ValueError, match="records gave no token, an epoch of this host has 5"),
    ):
        next(iterator)


def test_one_good_record_among_bad_ones_is_enough(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text('bad\nbad\n{"text": "good"}\nbad\n')
    with make_pipeline(
        paths=tmp_path / "a.jsonl", tokenizer=tokenizer, seq_len=8, batch_size=1, seed=0, on_bad_record="skip", epochs=40
    ) as iterator:
        # In 40 orders the good one is often first and then last, with six bad ones between.
        assert documents_of(list(iterator)) == [tokenizer.encode("good")] * 40


def refusal(state, arguments):
    with make_pipeline(**arguments) as iterator, pytest.raises(ValueError, match="cannot be continued exactly") as error:
        iterator.set_state(state)
    return str(error.value)


def test_state_of_other_data_is_refused_with_a_list_of_what_changed(arguments, write_jsonl, tmp_path):
    with make_pipeline(**arguments) as iterator:
        take(iterator, 2)
        state = iterator.get_state()
    other_tokenizer = train_tokenizer(["other text"], 270, tmp_path / "other")
    message = refusal(state, arguments | {"tokenizer": other_tokenizer, "seq_len": 32, "seed": 8, "process_count": 2})
    assert "seq_len: saved 24, now 32" in message
    assert "seed: saved 7, now 8" in message
    assert "process_count: saved 1, now 2" in message
    assert f"now {other_tokenizer.fingerprint()!r}" in message
    assert "files" not in message
    for change, words in (
        ({"batch_size": 8}, "batch_size: saved 4, now 8"),
        ({"packing": "none"}, "packing: saved 'greedy', now 'none'"),
        ({"shuffle": False}, "shuffle: saved True, now False"),
    ):
        assert words in refusal(state, arguments | change)
    third = write_jsonl("c.jsonl", ["new"])
    assert "new: c.jsonl" in refusal(state, arguments | {"paths": [*arguments["paths"], third]})
    assert "gone: b.jsonl" in refusal(state, arguments | {"paths": arguments["paths"][:1]})
    size = (tmp_path / "a.jsonl").stat().st_size
    write_jsonl("a.jsonl", [*TEXTS[:10], "y"])
    assert f"size changed: a.jsonl ({size} -> {size + 14} bytes)" in refusal(state, arguments)


def test_state_survives_a_move_of_the_folder_and_more_epochs(arguments, tmp_path):
    with make_pipeline(**arguments, epochs=1) as iterator:
        take(iterator, 2)
        state = iterator.get_state()
        expected = take(iterator, 2)
    (tmp_path / "moved").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    with make_pipeline(**arguments | {"paths": str(tmp_path / "moved" / "*.jsonl")}, epochs=5) as iterator:
        iterator.set_state(state)
        assert take(iterator, 2) == expected


def test_wrong_states(arguments):
    with make_pipeline(**arguments) as iterator:
        take(iterator, 20)
        state = iterator.get_state()
    with (
        make_pipeline(**arguments, epochs=1) as iterator,
        pytest.raises(ValueError, match="behind the end of the data; raise epochs"),
    ):
        iterator.set_state(state)
    with make_pipeline(**arguments) as iterator, pytest.raises(ValueError, match="version 99"):
        iterator.set_state(state | {"version": 99})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 5, "process_count": 2}, "batch_size 5 does not divide evenly among 2 processes"),
        ({"process_count": 48, "batch_size": 48}, "23 records cannot be shared by 48 processes"),
        ({"prefetch": -1}, "prefetch is -1"),
        ({"epochs": 0}, "epochs is 0"),
        ({"on_bad_record": "ignore"}, "on_bad_record is 'ignore'; expected one of error, skip"),
        ({"packing": "best"}, "packing is 'best'"),
        ({"seq_len": 1}, "seq_len is 1"),
    ],
)
def test_wrong_arguments(arguments, change, message):
    with pytest.raises(ValueError, match=message):
        make_pipeline(**arguments | change)


def test_a_dropped_iterator_ends_its_threads(arguments):
    def reading():
        return [thread for thread in threading.enumerate() if thread.name.startswith("grain-thread-prefetch")]

    before = len(reading())
    iterator = make_pipeline(**arguments)
    next(iterator)
    assert len(reading()) == before + 1
    del iterator
    gc.collect()
    assert len(reading()) == before


def test_a_run_that_a_bad_record_stopped_goes_on_by_skipping_it(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(json.dumps({"text": "word " * 9}) + "\n" for _ in range(3)) + "{broken\n" + json.dumps({"text": "end"}) + "\n"
    )
    arguments = {"paths": path, "tokenizer": tokenizer, "seq_len": 8, "batch_size": 1, "seed": 0, "shuffle": False, "epochs": 1}
    with make_pipeline(**arguments, prefetch=0) as strict:
        state = strict.get_state()
        with pytest.raises(ValueError, match=r"a\.jsonl, line 4"):
            while True:
                next(strict)
                state = strict.get_state()
    with make_pipeline(**arguments, on_bad_record="skip", format="jsonl") as lenient:
        lenient.set_state(state)
        rest = [batch["input_ids"] for batch in lenient]
        assert lenient.skipped_records == 1
    assert rest


def test_a_malformed_state_is_refused(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "word"}) + "\n")
    with make_pipeline(paths=path, tokenizer=tokenizer, seq_len=8, batch_size=1, seed=0) as pipeline:
        state = pipeline.get_state()
        del state["position"]
        with pytest.raises(ValueError, match="lacks position; expected what get_state"):
            pipeline.set_state(state)
