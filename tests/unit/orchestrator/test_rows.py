"""Rows on their way to storage that is slow to take them, or refuses them for a while."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator import rows as module
from orchestrator.rows import Rows
from orchestrator.rundir import Row, RunDir

FILE = "metrics.jsonl"


class Refusing(RunDir):
    """A run directory whose storage may refuse everything."""

    refuses: BaseException | None = None
    written = 0

    def append(self, name: str, rows: Any) -> None:
        """Refuse, or append."""
        if self.refuses:
            raise self.refuses
        self.written += 1
        super().append(name, rows)

    def replace_rows(self, name: str, rows: Any) -> None:
        """Refuse, or replace."""
        if self.refuses:
            raise self.refuses
        super().replace_rows(name, rows)


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
    rows = Rows(run, FILE, hold=5.0)
    stored = []
    for step in range(20):
        rows.add([row(step)])
        stored.append(rows.flush())
        clock[0] += 1.0
    assert stored == [0, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0, 6, 0, 0]
    assert run.written == 3
    assert rows.all() == [row(step) for step in range(20)]
    assert (rows.flush(now=True), rows.flush(now=True)) == (2, 0)
    assert run.rows(FILE) == rows.all()


def test_rows_that_need_not_wait_do_not(run: Refusing) -> None:
    rows = Rows(run, FILE)
    rows.add([row(1)])
    assert rows.flush() == 1


def test_storage_that_refuses_is_asked_less_and_less(run: Refusing, clock: list[float]) -> None:
    rows, tries = Rows(run, FILE), []
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


def test_an_exchange_that_is_refused_is_not_forgotten(run: Refusing) -> None:
    rows = Rows(run, FILE)
    rows.add([row(1), row(2), row(3)])
    rows.flush()
    run.refuses = OSError(28, "No space left on device")
    rows.exchange([row(1)])
    rows.add([row(2)])
    assert rows.flush(now=True) == 0
    assert rows.all() == [row(1), row(2)]
    assert run.rows(FILE) == [row(1), row(2), row(3)]
    run.refuses = None
    assert rows.flush(now=True) == 1
    assert run.rows(FILE) == [row(1), row(2)]


def test_the_end_waits_for_storage_within_bounds(run: Refusing, clock: list[float]) -> None:
    rows = Rows(run, FILE)
    rows.settle(10.0)
    run.refuses = OSError(28, "No space left on device")
    rows.add([row(1)])
    with pytest.raises(
        OSError, match=r"rows could not be written to .*metrics.jsonl: OSError: .*No space left"
    ):
        rows.settle(10.0)
    assert 110.0 <= clock[0] < 111.0
    run.refuses = None
    rows.settle(10.0)
    assert run.rows(FILE) == [row(1)]


def test_a_fault_of_the_program_is_none_of_storage(run: Refusing) -> None:
    rows = Rows(run, FILE)
    rows.add([{"step": object()}])
    with pytest.raises(TypeError):
        rows.flush()
