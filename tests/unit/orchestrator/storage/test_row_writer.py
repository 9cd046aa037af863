"""Rows on their way to storage that is slow to take them, or refuses them for a while."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from orchestrator.storage import row_writer as module
from orchestrator.storage.row_writer import RowWriter
from orchestrator.storage.run_directory import Row, RunDir

FILE = "rows.jsonl"


class Refusing(RunDir):
    """A run directory whose storage may refuse everything."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.refuses: BaseException | None = None
        self.written = 0
        log = self.log(FILE)
        self._append, self._cut = log.append, log.cut
        log.append, log.cut = self.append_or_refuse, self.cut_or_refuse

    def append_or_refuse(self, rows: Sequence[Row]) -> int:
        """Refuse, or append."""
        if self.refuses:
            raise self.refuses
        self.written += 1
        return self._append(rows)

    def cut_or_refuse(self, step: int) -> int:
        """Refuse, or cut."""
        if self.refuses:
            raise self.refuses
        return self._cut(step)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in seconds; sleeping takes it on."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


@pytest.fixture
def run(tmp_path: Path) -> Refusing:
    return Refusing(str(tmp_path))


def row(step: int) -> Row:
    return {"step": step}


def test_rows_wait_for_others_and_no_longer(run: Refusing, clock: list[float]) -> None:
    rows = RowWriter(run, FILE, hold=5.0)
    stored = []
    for step in range(20):
        rows.add([row(step)])
        stored.append(rows.flush())
        clock[0] += 1.0
    assert stored == [0, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0, 6, 0, 0]
    assert run.written == 3
    assert list(rows.newest())[::-1] == [row(step) for step in range(20)]
    assert (rows.flush(now=True), rows.flush(now=True)) == (2, 0)
    assert run.rows(FILE) == list(rows.newest())[::-1]


def test_rows_that_need_not_wait_do_not(run: Refusing) -> None:
    rows = RowWriter(run, FILE)
    rows.add([row(1)])
    assert rows.flush() == 1


def test_storage_that_refuses_is_asked_less_and_less(run: Refusing, clock: list[float]) -> None:
    rows, tries = RowWriter(run, FILE), []
    run.refuses = OSError(28, "No space left on device")
    for step in range(300):
        rows.add([row(step)])
        before, rows.problem = rows.problem, ""
        assert rows.flush() == 0
        tries += [step] if rows.problem else []
        rows.problem = rows.problem or before
        clock[0] += 1.0
    assert tries == [0, 1, 3, 7, 15, 31, 61, 91, 121, 151, 181, 211, 241, 271]
    assert "No space left on device" in rows.problem
    run.refuses = None
    assert rows.flush(now=True) == 300
    assert (rows.problem, run.rows(FILE)) == ("", [row(step) for step in range(300)])


def test_a_cut_that_is_refused_is_not_forgotten(run: Refusing) -> None:
    rows = RowWriter(run, FILE)
    rows.add([row(1), row(2), row(3)])
    rows.flush()
    run.refuses = OSError(28, "No space left on device")
    rows.add([row(4)])
    rows.cut(4, [row(3), row(4)])
    rows.cut(2, [row(2)])
    rows.add([row(3) | {"again": True}])
    assert rows.flush(now=True) == 0
    wanted = [row(1), row(2), row(3) | {"again": True}]
    assert list(rows.newest())[::-1] == wanted
    assert run.rows(FILE) == [row(1), row(2), row(3)]
    run.refuses = None
    assert rows.flush(now=True) == 1, "rows that a commit carried are not counted"
    assert run.rows(FILE) == wanted
    assert rows.mark == {"step": 3, "bytes": run.log(FILE).size()}


def test_a_cut_keeps_what_waits_and_adds_what_a_commit_carried(run: Refusing) -> None:
    rows = RowWriter(run, FILE, hold=60.0)
    rows.add([row(1), row(2)])
    rows.flush(now=True)
    rows.add([row(3), row(4), row(5)])
    rows.cut(4, [row(2), row(4)])
    assert run.rows(FILE) == [row(1), row(2), row(3), row(4)]
    rows.cut(0, [])
    assert (run.rows(FILE), rows.mark) == ([], None)


def test_what_was_taken_away_is_missed_and_little_is_read_if_nothing_was(
    run: Refusing, tmp_path: Path
) -> None:
    rows = RowWriter(run, FILE)
    rows.add([row(n) for n in range(1, 5001)])
    rows.flush()
    mark, path = rows.mark, tmp_path / FILE
    rows.add([row(5001)])
    rows.flush()
    assert rows.missing(mark, 1, 5001) == rows.missing(None, 1, 5001) == []
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:10], *lines[20:4000], b"nothing\n", *lines[4001:]]))
    assert rows.missing(mark, 1, 5001) == [(11, 20), (4001, 4001)]
    path.write_bytes(b"".join(lines[:-10]))
    assert rows.missing(mark, 1, 5001) == [(4992, 5001)]
    path.write_bytes(b"")
    assert rows.missing(mark, 3, 5001) == [(3, 5001)]
    path.write_bytes(whole[: mark["bytes"]] + lines[5000])
    rows.log.forward = None  # nothing is read from the beginning
    assert rows.missing(mark, 1, 5001) == []


def test_the_end_waits_for_storage_within_bounds(run: Refusing, clock: list[float]) -> None:
    rows = RowWriter(run, FILE)
    rows.drain(10.0)
    run.refuses = OSError(28, "No space left on device")
    rows.add([row(1)])
    with pytest.raises(OSError, match=r"rows could not be written to .*rows.jsonl: OSError: .*No space left"):
        rows.drain(10.0)
    assert 110.0 <= clock[0] < 111.0
    run.refuses = None
    rows.drain(10.0)
    assert run.rows(FILE) == [row(1)]


def test_a_fault_of_the_program_is_none_of_storage(run: Refusing) -> None:
    rows = RowWriter(run, FILE)
    rows.add([{"step": object()}])
    with pytest.raises(TypeError):
        rows.flush()
