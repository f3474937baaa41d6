import json

import jax.numpy as jnp
import pytest

from ernie_jax.train.flops import Peak
from ernie_jax.train.progress import progress_line
from ernie_jax.train.records import mfu, read_records, rewind_records, to_host


def test_host_records_are_json_without_nan():
    record = to_host({"loss": jnp.float32(jnp.nan), "n": jnp.int32(3), "router": {"load": jnp.array([[1.0, jnp.inf]])}})
    assert record == {"loss": None, "n": 3, "router": {"load": [[1.0, None]]}}
    json.dumps(record, allow_nan=False)


def test_a_resumed_file_reads_as_one_run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s}) + "\n" for s in range(1, 7)) + '{"step": 7, "lo')
    assert [r["step"] for r in rewind_records(path, 4)] == [1, 2, 3, 4]
    assert [r["step"] for r in read_records(path)] == [1, 2, 3, 4]
    assert rewind_records(tmp_path / "none.jsonl", 3) == []


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2"):
        read_records(path)


def test_mfu_is_a_share_of_the_stated_peak():
    assert mfu(100.0, 3e6, Peak(1e9, "stated")) == pytest.approx(0.3)
    assert mfu(100.0, 3e6, Peak(None, "unknown")) is None


def test_the_progress_line_tells_what_a_person_watches():
    record = {
        "step": 40,
        "loss": 3.25,
        "lr": 1e-3,
        "tokens": 1000.0,
        "tokens_per_s": 12500.0,
        "mfu": 0.417,
        "skipped": 2,
        "router": {"balance": [0.8, 0.9]},
        "eval_loss": 3.5,
    }
    line = progress_line(record, 100, 500.0)
    assert (
        line
        == "step  40/100  loss 3.2500  lr 1.00e-03  12.5k tokens/s  MFU 41.7%  balance 85%  held-out 3.5000  skipped 2  ETA 2:00"
    )
    dense = progress_line(record | {"router": {}, "mfu": None, "loss": None, "eval_loss": None}, 100, None)
    assert "loss n/a" in dense and "MFU n/a" in dense and "ETA n/a" in dense and "balance" not in dense
