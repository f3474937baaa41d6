import json
import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from etils import epath

from ernie_jax.data import BadRecordError, open_records
from ernie_jax.data.parquet import RowGroupCache
from ernie_jax.data.shards import OpenFiles


def texts(records):
    return [records[index] for index in range(len(records))]


def write_parquet(path, values, *, name="text", rows_per_group=2, kind=None):
    pq.write_table(pa.table({"other": list(range(len(values))), name: pa.array(values, kind)}), path, row_group_size=rows_per_group)
    return str(path)


def test_a_text_file_is_one_document(tmp_path):
    for name, text in (("b.txt", "second\r\n\n"), ("a.py", "first 漢字"), ("c.md", "")):
        (tmp_path / name).write_bytes(text.encode())
    assert texts(open_records(str(tmp_path / "*"))) == ["first 漢字", "second\r\n\n", ""]


def test_jsonl_lines_in_any_order(tmp_path):
    expected = ["one", "zwei 漢字\n", "", "x" * 5000]
    lines = [json.dumps({"n": i, "text": text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(expected)]
    # Windows line ends, a blank line, a byte-order mark and no newline at the end are all found in the wild.
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join([*lines[:2], "", *lines[2:]]).encode())
    records = open_records(tmp_path / "a.jsonl")
    assert [records[i] for i in (4, 0, 3, 1, 2)] == ["x" * 5000, "one", "", "zwei 漢字\n", ""]


def test_lines_are_found_across_blocks_of_the_scan(tmp_path, monkeypatch):
    monkeypatch.setattr("ernie_jax.data.shards._SCAN_BYTES", 7)
    expected = [str(i) * i for i in range(1, 9)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in expected))
    assert texts(open_records(tmp_path / "a.jsonl")) == expected


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_rows_over_row_groups(tmp_path, kind):
    expected = ["a", "b", "漢", "d", "e"]
    records = open_records(write_parquet(tmp_path / "a.parquet", expected, kind=kind))
    assert [records[i] for i in (4, 1, 2, 0, 3)] == ["e", "b", "漢", "a", "d"]


def test_formats_mix_under_one_index_sorted_by_path(tmp_path):
    write_parquet(tmp_path / "b.parquet", ["p", "q"])
    (tmp_path / "c.txt").write_text("t")
    (tmp_path / "a.jsonl").write_text('{"text": "j"}\n')
    records = open_records([str(tmp_path / "c*"), str(tmp_path / "*.parquet"), str(tmp_path / "a.jsonl"), str(tmp_path / "*.txt")])
    assert texts(records) == ["j", "p", "q", "t"]
    assert [name for name, _ in records.files] == ["a.jsonl", "b.parquet", "c.txt"]
    assert records.files[2] == ("c.txt", 1)
    with pytest.raises(IndexError, match="record 4 of 4"):
        records[4]


def test_field_and_format_are_choices(tmp_path):
    (tmp_path / "a.data").write_text('{"body": "x", "text": "wrong"}\n')
    assert texts(open_records(tmp_path / "a.data", format="jsonl", text_field="body")) == ["x"]
    assert texts(open_records(tmp_path / "a.data", format="text")) == ['{"body": "x", "text": "wrong"}\n']
    records = open_records(write_parquet(tmp_path / "a.parquet", ["y"], name="body"), text_field="body")
    assert texts(records) == ["y"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "not JSON"),
        (b'["a"]', "a JSON list, expected an object with the field 'text'"),
        (b'{"body": "a"}', r"no field 'text'; the record has \['body'\]"),
        (b'{"text": 3}', "field 'text' is a int, expected a string"),
        (b'{"text": null}', "field 'text' is a NoneType"),
        (b'{"text": "\xff"}', "not UTF-8"),
        (b'{"text": "a\\ud800"}', "lone surrogate at character 1"),
        (b"[" * 200_000, "not JSON"),
    ],
)
def test_bad_jsonl_record_names_file_and_line(tmp_path, line, message):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(b'{"text": "good"}\n\n' + line + b'\n{"text": "also good"}\n')
    records = open_records(file)
    assert (records[0], records[3]) == ("good", "also good")
    with pytest.raises(BadRecordError, match=rf"bad\.jsonl, line 3: .*{message}"):
        records[2]


def test_bad_text_file_names_file_and_line(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"one\ntwo\nthr\xe9e\n")
    with pytest.raises(ValueError, match=r"bad\.txt, line 3: not UTF-8"):
        open_records(tmp_path / "bad.txt")[0]


def test_bad_parquet_rows_and_files(tmp_path):
    records = open_records(write_parquet(tmp_path / "null.parquet", ["a", "b", None]))
    assert records[1] == "b"
    with pytest.raises(BadRecordError, match=r"null\.parquet, row 2: column 'text' is null"):
        records[2]
    broken = pa.Array.from_buffers(pa.string(), 2, pa.array([b"good", b"\xff\xfe"], pa.binary()).buffers())
    pq.write_table(pa.table({"text": broken}), tmp_path / "bytes.parquet")
    records = open_records(tmp_path / "bytes.parquet")
    assert records[0] == "good"
    with pytest.raises(BadRecordError, match=r"bytes\.parquet, row 1: not UTF-8"):
        records[1]
    with pytest.raises(ValueError, match=r"null\.parquet has no column 'body'; its columns are \['other', 'text'\]"):
        open_records(tmp_path / "null.parquet", text_field="body")
    with pytest.raises(ValueError, match="column 'other' holds int64, expected strings"):
        open_records(tmp_path / "null.parquet", text_field="other")
    (tmp_path / "no.parquet").write_text("text")
    with pytest.raises(ValueError, match=r"no\.parquet is not a readable Parquet file"):
        open_records(tmp_path / "no.parquet")


def test_globs(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for name in ("a.txt", "deep/b.txt", "deep/er/c.txt", "[x].txt"):
        (tmp_path / name).write_text(name)
    assert texts(open_records(str(tmp_path / "**" / "*.txt"))) == ["[x].txt", "a.txt", "deep/b.txt", "deep/er/c.txt"]
    # A name that exists is no pattern.
    assert texts(open_records(str(tmp_path / "[x].txt"))) == ["[x].txt"]
    assert texts(open_records(str(tmp_path / "d*" / "?.txt"))) == ["deep/b.txt"]


def test_paths_that_match_nothing(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    missing = str(tmp_path / "*.jsonl")
    with pytest.raises(ValueError, match="no file matches") as error:
        open_records([str(tmp_path / "a.txt"), missing])
    assert missing in str(error.value)
    with pytest.raises(ValueError, match="it is a folder"):
        open_records(str(tmp_path))
    with pytest.raises(ValueError, match="no data files are given"):
        open_records([])


def test_unknown_formats_and_empty_files(tmp_path):
    (tmp_path / "a.gz").write_text("a")
    with pytest.raises(ValueError, match=r"a\.gz is not known from its suffix '\.gz'"):
        open_records(tmp_path / "a.gz")
    with pytest.raises(ValueError, match="format is 'csv'; expected auto or one of text, jsonl, parquet"):
        open_records(tmp_path / "a.gz", format="csv")
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(ValueError, match="no record"):
        open_records(tmp_path / "a.jsonl")


def test_remote_paths_are_read_through_epath(tmp_path, remote):
    (tmp_path / "day1").mkdir()
    (tmp_path / "day1" / "a.jsonl").write_text('{"text": "far"}\n')
    write_parquet(tmp_path / "day1" / "b.parquet", ["away"])
    (tmp_path / "day1" / "c.txt").write_text("!")
    records = open_records(f"{remote}/day*/*")
    assert texts(records) == ["far", "away", "!"]
    assert [name for name, _ in records.files] == ["a.jsonl", "b.parquet", "c.txt"]
    assert texts(open_records(f"{remote}/day1/c.txt")) == ["!"]
    with pytest.raises(ValueError, match="no file matches"):
        open_records(f"{remote}/day*/*.md")
    with pytest.raises(ValueError, match="is for local paths"):
        open_records(f"{remote}/**/*.txt")


def test_threads_read_the_same_as_one(tmp_path):
    expected = {}
    for number in range(5):
        lines = [f"{number}-{i}" * (1 + i % 7) for i in range(40)]
        (tmp_path / f"{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
        expected[number] = lines
    records = open_records(str(tmp_path / "*.jsonl"))
    found = {}

    def read(worker):
        found[worker] = [records[(index * 7 + worker) % 200] for index in range(200)]

    workers = [threading.Thread(target=read, args=(worker,)) for worker in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    flat = [text for number in range(5) for text in expected[number]]
    assert all(found[worker] == [flat[(index * 7 + worker) % 200] for index in range(200)] for worker in range(4))


def test_open_files_stay_within_the_limit(tmp_path):
    paths = [epath.Path(tmp_path / f"{i}.bin") for i in range(10)]
    for i, path in enumerate(paths):
        path.write_bytes(bytes([i] * 4))
    files = OpenFiles(limit=3)
    assert [files.read(path, 1, 3) for path in paths * 2] == [bytes([i] * 2) for i in range(10)] * 2
    assert len(files) == 3
    files.close()
    assert len(files) == 0
    with pytest.raises(ValueError, match="after its records were closed"):
        files.read(paths[0], 0, 1)


def test_row_groups_are_kept_within_the_limit():
    column = pa.array(["x" * 100])
    reads = []

    def read(name):
        reads.append(name)
        return column

    cache = RowGroupCache(limit=2 * column.nbytes)
    for name in ("a", "b", "a", "c", "a", "b"):
        cache.get((name, 0), lambda name=name: read(name))
    # "b" was used least recently when "c" came, so it alone was read again.
    assert reads == ["a", "b", "c", "b"]


@pytest.mark.parametrize("pattern", ["nowhere://a.jsonl", "nowhere://a/*.jsonl"])
def test_addresses_of_an_unknown_kind(pattern):
    with pytest.raises(ValueError, match="cannot look for 'nowhere://a"):
        open_records(pattern)
