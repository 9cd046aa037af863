"""What a command is doing is said on a terminal, if it takes long, and nowhere else."""

from __future__ import annotations

import io
import threading

import pytest

from orchestrator.cli.stage_notice import StageNotice


class Stream(io.StringIO):
    """A stream that says when something has been written."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal
        self.written = threading.Event()

    def isatty(self) -> bool:
        return self._is_terminal

    def flush(self) -> None:
        self.written.set()


def test_a_stage_that_takes_long_is_named() -> None:
    terminal = Stream(is_terminal=True)
    with StageNotice(False, terminal, after=600.0) as notice:
        notice.begin("reading the data")
    with StageNotice(False, terminal, after=0.0) as notice:
        notice.begin("comparing layouts")
        assert terminal.written.wait(60.0)
    assert terminal.getvalue() == "orchestrator: comparing layouts ...\n"


@pytest.mark.parametrize(("as_json", "is_terminal"), [(True, True), (False, False)])
def test_neither_scripts_nor_logs_get_it(as_json: bool, is_terminal: bool) -> None:
    before = threading.active_count()
    stream = Stream(is_terminal)
    with StageNotice(as_json, stream, after=600.0) as notice:
        notice.begin("reading the data")
        assert threading.active_count() == before
    assert stream.getvalue() == ""
