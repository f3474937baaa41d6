"""What the tests of the benches share."""

import runpy
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"


@pytest.fixture
def refused(request, monkeypatch, capsys):
    """The message that `COMMAND` of the test's module with further arguments is refused with, before anything is printed.

    In this process, for nothing is started.
    """
    monkeypatch.syspath_prepend(LAUNCH)

    def message(*arguments):
        with pytest.raises(SystemExit) as left:
            runpy.run_path(str(LAUNCH / "bench.py"))["main"]([*request.module.COMMAND, *map(str, arguments)])
        assert left.value.code == 2
        printed = capsys.readouterr()
        assert not printed.out
        return " ".join(printed.err.split())

    return message
