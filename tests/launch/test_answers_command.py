"""`launch/answers.py`: what is refused before any work, and a picture of questions about videos."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from ernie_jax.data.multimodal.records import MediaItem, Record
from ernie_jax.serve.answers import Answer

SCRIPT = Path(__file__).parents[2] / "launch" / "answers.py"


def record(media=()):
    answer = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    return Record("x", messages=({"role": "user", "content": "q"}, {"role": "assistant", "content": answer}), media=media)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--picture", "expected the name of a PNG file"),
        ("--run", "metrics.jsonl has no held-out loss"),
        ("--limit=0", "at least 1"),
    ],
)
def test_arguments_are_refused_in_one_line_before_any_work(tmp_path, option, message):
    (tmp_path / "q.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    given = [option] if "=" in option else [option, tmp_path]
    command = [sys.executable, SCRIPT, "--model", tmp_path, "--questions", tmp_path / "q.jsonl", *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_questions_about_videos_alone_leave_the_picture_empty(tmp_path):
    spec = importlib.util.spec_from_file_location("answers", SCRIPT)
    answers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(answers)
    answers.draw([Answer(record((MediaItem("video", "no-such-file"),)), "a", "b")], tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 0
