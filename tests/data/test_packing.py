import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ernie_jax.data import Packer
from ernie_jax.data.packing import stack_rows

EOS, PAD = 2, 0
KEYS = {"input_ids", "labels", "segment_ids", "position_ids"}


def pack(documents, seq_len, packing="greedy"):
    packer = Packer(seq_len=seq_len, eos_token_id=EOS, pad_token_id=PAD, packing=packing)
    rows = []
    for document in documents:
        packer.add(document)
        while (row := packer.next_row()) is not None:
            rows.append(row)
    if (row := packer.flush()) is not None:
        rows.append(row)
    return rows


def lists(row):
    return {key: value.tolist() for key, value in row.items()}


def test_two_documents_in_one_row():
    (row,) = pack([[10, 11, 12], [20, 21]], 9)
    assert lists(row) == {
        "input_ids": [10, 11, 12, EOS, 20, 21, EOS, PAD, PAD],
        "labels": [11, 12, EOS, -100, 21, EOS, -100, -100, -100],
        "segment_ids": [1, 1, 1, 1, 2, 2, 2, 0, 0],
        "position_ids": [0, 1, 2, 3, 0, 1, 2, 0, 0],
    }
    assert all(value.dtype == np.int32 for value in row.values())


def test_label_at_a_cut_is_the_first_token_of_the_next_row():
    first, second = pack([[10], [20, 21, 22, 23]], 4)
    assert lists(first) == {
        "input_ids": [10, EOS, 20, 21],
        "labels": [EOS, -100, 21, 22],
        "segment_ids": [1, 1, 2, 2],
        "position_ids": [0, 1, 0, 1],
    }
    assert lists(second) == {
        "input_ids": [22, 23, EOS, PAD],
        "labels": [23, EOS, -100, -100],
        "segment_ids": [1, 1, 1, 0],
        "position_ids": [0, 1, 2, 0],
    }


def test_a_document_that_ends_with_its_row_has_no_label_into_the_next():
    first, second = pack([[10, 11, 12], [20]], 4)
    assert first["labels"].tolist() == [11, 12, EOS, -100]
    assert second["input_ids"].tolist() == [20, EOS, PAD, PAD]


def test_equal_documents_do_not_share_a_segment():
    (row,) = pack([[7, 7], [7, 7], [7, 7]], 9)
    assert row["segment_ids"].tolist() == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert row["position_ids"].tolist() == [0, 1, 2] * 3
    assert row["labels"].tolist() == [7, EOS, -100] * 3


def test_a_document_that_ends_with_eos_itself_still_is_one_document():
    (row,) = pack([[7, EOS, 8]], 6)
    assert row["segment_ids"].tolist() == [1, 1, 1, 1, 0, 0]
    assert row["labels"].tolist() == [EOS, 8, EOS, -100, -100, -100]


def test_without_packing_each_document_has_its_own_rows():
    rows = pack([[10], [20, 21, 22, 23], [30, 31]], 3, packing="none")
    assert [row["input_ids"].tolist() for row in rows] == [[10, EOS, PAD], [20, 21, 22], [23, EOS, PAD], [30, 31, EOS]]
    assert [row["labels"].tolist() for row in rows] == [[EOS, -100, -100], [21, 22, 23], [EOS, -100, -100], [31, EOS, -100]]
    assert {int(row["segment_ids"].max()) for row in rows} == {1}


def test_empty_documents_leave_no_trace():
    assert [lists(row) for row in pack([[], [5, 6], [], []], 4)] == [lists(row) for row in pack([[5, 6]], 4)]
    assert pack([[], []], 4) == []


def test_empty_row_has_no_label():
    row = Packer(seq_len=3, eos_token_id=EOS, pad_token_id=9).empty_row()
    assert lists(row) == {"input_ids": [9] * 3, "labels": [-100] * 3, "segment_ids": [0] * 3, "position_ids": [0] * 3}
    assert {key: value.shape for key, value in stack_rows([row, row]).items()} == dict.fromkeys(KEYS, (2, 3))


def read_back(rows):
    """Documents and their labels as a reader of the rows alone sees them: pieces join where the label at a cut says so."""
    documents, labels, joins = [], [], False
    for row in rows:
        for segment in range(1, int(row["segment_ids"].max()) + 1):
            (places,) = np.nonzero(row["segment_ids"] == segment)
            assert np.array_equal(places, np.arange(places[0], places[-1] + 1))
            assert row["position_ids"][places].tolist() == list(range(len(places)))
            if joins:
                assert segment == 1
                assert labels[-1][-1] == row["input_ids"][places[0]]
                documents[-1] += row["input_ids"][places].tolist()
                labels[-1] += row["labels"][places].tolist()
            else:
                documents.append(row["input_ids"][places].tolist())
                labels.append(row["labels"][places].tolist())
            joins = labels[-1][-1] != -100
        padding = row["segment_ids"] == 0
        assert np.all(row["labels"][padding] == -100)
        assert np.all(row["input_ids"][padding] == PAD)
        # Padding is behind the pieces only.
        assert not np.any(padding[:-1] & ~padding[1:])
    return documents, labels


@given(
    documents=st.lists(st.lists(st.integers(0, 5), max_size=17), max_size=12),
    seq_len=st.integers(2, 9),
    packing=st.sampled_from(["greedy", "none"]),
)
@settings(max_examples=100, deadline=None)
def test_every_token_of_every_document_appears_once_and_in_order(documents, seq_len, packing):
    rows = pack(documents, seq_len, packing)
    expected = [[*document, EOS] for document in documents if document]
    found, labels = read_back(rows)
    assert found == expected
    assert labels == [[*document[1:], -100] for document in expected]
    if packing == "greedy":
        assert len(rows) == -(-sum(map(len, expected)) // seq_len)
    assert all(set(row) == KEYS and {value.shape for value in row.values()} == {(seq_len,)} for row in rows)


@given(
    documents=st.lists(st.lists(st.integers(3, 9), min_size=1, max_size=11), min_size=1, max_size=8),
    seq_len=st.integers(2, 6),
    stop=st.integers(0, 40),
)
@settings(max_examples=50, deadline=None)
def test_state_taken_at_any_moment_continues_exactly(documents, seq_len, stop):
    packer = Packer(seq_len=seq_len, eos_token_id=EOS, pad_token_id=PAD)
    queue, rows, moment = list(documents), [], 0
    while True:
        if moment == stop:
            state = packer.get_state()
            text = json.dumps({"pieces": [piece.tolist() for piece in state["pieces"]], "rest": state["rest"].tolist()})
            packer = Packer(seq_len=seq_len, eos_token_id=EOS, pad_token_id=PAD)
            packer.set_state(json.loads(text))
        moment += 1
        row = packer.next_row()
        if row is not None:
            rows.append(row)
        elif queue:
            packer.add(queue.pop(0))
        else:
            break
    if (row := packer.flush()) is not None:
        rows.append(row)
    assert [lists(row) for row in rows] == [lists(row) for row in pack(documents, seq_len)]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"seq_len": 1}, "seq_len is 1"), ({"seq_len": 4, "packing": "best"}, "packing is 'best'; expected one of greedy, none")],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        Packer(eos_token_id=EOS, pad_token_id=PAD, **options)
