import numpy as np
import pytest

from ernie_jax.data import heldout_batches

TEXTS = [f"document {i} " * (1 + i % 4) for i in range(12)]


def documents_of(batches, eos=2):
    tokens = np.concatenate([batch["input_ids"][batch["segment_ids"] > 0] for batch in batches]).tolist()
    documents, start = [], 0
    for stop, token in enumerate(tokens, start=1):
        if token == eos:
            documents.append(tokens[start : stop - 1])
            start = stop
    return documents


def test_batches_are_finite_whole_and_the_same_each_time(tokenizer, write_jsonl):
    batches = heldout_batches(paths=write_jsonl("a.jsonl", TEXTS), tokenizer=tokenizer, seq_len=16, batch_size=4, max_batches=None)
    first, second = list(batches), list(batches)
    assert len(first) == len(second) > 1
    for one, two in zip(first, second, strict=True):
        assert set(one) == {"input_ids", "labels", "segment_ids", "position_ids"}
        for key in one:
            assert one[key].shape == (4, 16)
            assert one[key].dtype == np.int32
            assert np.array_equal(one[key], two[key])
    assert sorted(documents_of(first)) == sorted(tokenizer.encode(text) for text in TEXTS)


def test_last_batch_is_filled_with_rows_without_labels(tokenizer, write_jsonl):
    path = write_jsonl("a.jsonl", ["short", "text"])
    (batch,) = heldout_batches(paths=path, tokenizer=tokenizer, seq_len=32, batch_size=4, max_batches=9)
    assert np.all(batch["labels"][1:] == -100)
    assert np.all(batch["segment_ids"][1:] == 0)
    assert np.any(batch["labels"][0] >= 0)


def test_max_batches_is_a_prefix(tokenizer, write_jsonl):
    arguments = {"paths": write_jsonl("a.jsonl", TEXTS), "tokenizer": tokenizer, "seq_len": 16, "batch_size": 2}
    everything = list(heldout_batches(**arguments, max_batches=None))
    some = list(heldout_batches(**arguments, max_batches=3))
    assert len(some) == 3 < len(everything)
    for one, two in zip(some, everything[:3], strict=True):
        assert np.array_equal(one["input_ids"], two["input_ids"])


def test_hosts_share_the_rows_of_each_batch(tokenizer, write_jsonl):
    arguments = {
        "paths": write_jsonl("a.jsonl", TEXTS),
        "tokenizer": tokenizer,
        "seq_len": 16,
        "batch_size": 4,
        "max_batches": None,
    }
    alone = list(heldout_batches(**arguments))
    hosts = [list(heldout_batches(**arguments, process_index=host, process_count=2)) for host in range(2)]
    assert len(hosts[0]) == len(hosts[1]) == len(alone)
    for whole, first, second in zip(alone, *hosts, strict=True):
        for key in whole:
            assert np.array_equal(whole[key], np.concatenate([first[key], second[key]]))


def test_bad_records_and_wrong_arguments(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\nnot json\n')
    arguments = {"paths": tmp_path / "a.jsonl", "tokenizer": tokenizer, "seq_len": 8, "batch_size": 2}
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: not JSON"):
        list(heldout_batches(**arguments, max_batches=None))
    assert len(list(heldout_batches(**arguments, max_batches=None, on_bad_record="skip"))) == 1
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(ValueError, match="gave no token"):
        list(heldout_batches(**arguments, max_batches=None))
    with pytest.raises(ValueError, match="max_batches is 0"):
        heldout_batches(**arguments, max_batches=0)
    with pytest.raises(ValueError, match="batch_size 2 does not divide"):
        heldout_batches(**arguments, max_batches=1, process_count=3)
