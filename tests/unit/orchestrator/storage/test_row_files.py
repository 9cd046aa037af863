"""Parts of rows on an object store, after a crash of their writer at any point and with answers that were lost."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.storage import row_files
from orchestrator.storage.row_files import NumberedRowFiles, Part, SingleRowFile
from orchestrator.storage.row_line import METRICS, Row
from orchestrator.storage.row_log import RowLog, gaps

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))
import object_model

PATH = "run/metrics.jsonl"


def row(step: int, attempt: int) -> Row:
    return {"step": step, "attempt": attempt, "time": 1e9, "step_seconds": 0.5, "text": "x" * (step % 7)}


def call(function: Any, *args: Any, **more: Any) -> Any:
    return function(*args, **more)


def log_on(fs: Any) -> RowLog:
    return RowLog(NumberedRowFiles(fs, PATH, call), METRICS)


def write(log: RowLog, note: Any, chance: random.Random) -> list[list[Row]]:
    """A life of a writer: rows, rollbacks, rows put back. What is there after each call; `note` is told of each."""
    states: list[list[Row]] = [[]]
    for attempt in range(1, 5):
        for _ in range(chance.randint(2, 30)):
            last = states[-1][-1]["step"] if states[-1] else 0
            new = [row(last + 1 + n, attempt) for n in range(chance.randint(1, 4))]
            log.append(new)
            states.append(states[-1] + new)
            note.mark(len(states) - 1)
        to = chance.randint(max(0, states[-1][-1]["step"] - 40), states[-1][-1]["step"])
        log.cut(to)
        states.append([r for r in states[-1] if r["step"] <= to])
        note.mark(len(states) - 1)
    return states


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "MERGED_BYTES", 2000)


SOME = 120
"""States after a crash that the default suite looks at; of all there are, which takes minutes."""


@pytest.mark.parametrize("seed", range(3))
def test_a_crash_at_any_point_loses_no_row_and_doubles_none(seed: int) -> None:
    """Of a call under way all is there or nothing; late doubles of earlier requests change nothing."""
    recorded = object_model.RecordedObjects()
    states = write(log_on(recorded), recorded, random.Random(seed))
    crashes = list(object_model.states(recorded.ops, 0, random.Random(seed)))
    crash_each(recorded, states, random.Random(seed).sample(crashes, SOME))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_crash_at_every_point(seed: int) -> None:
    recorded = object_model.RecordedObjects()
    states = write(log_on(recorded), recorded, random.Random(seed))
    crash_each(recorded, states, object_model.states(recorded.ops, 600, random.Random(seed)))


def crash_each(recorded: Any, states: list[list[Row]], crashes: Any) -> None:
    """What is found after each crash is what was there before or after the call under way, and a writer goes on."""
    seen = set()
    for crash in crashes:
        done = max((op.step for op in recorded.ops[: crash.length] if hasattr(op, "step")), default=0)
        objects = object_model.replay(recorded.ops, crash)
        if (key := (done, frozenset(objects))) in seen:
            continue
        seen.add(key)
        log = log_on(object_model.RecordedObjects(objects))
        found = list(log.rows())
        assert found in states[done : done + 2], str(crash)
        last = found[-1]["step"] if found else 0
        log.cut(last // 2)
        log.append([row(last // 2 + 1, 9)])
        assert list(log.rows()) == [*[r for r in found if r["step"] <= last // 2], row(last // 2 + 1, 9)]


def test_there_are_few_objects_however_many_rows_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "MERGED_BYTES", 4096)
    fs = object_model.RecordedObjects()
    log, most = log_on(fs), 0
    for step in range(1, 3001):
        log.append([row(step, 1)])
        most = max(most, len(fs.store))
    assert gaps(log.extents(), 1, 3000) == []
    size = log.size()
    assert most <= size / row_files.MERGED_BYTES * 2 + 40, (most, size)
    written = sum(len(op.data) for op in fs.ops if isinstance(op, object_model.Put))
    assert written <= 6 * size, "each row is written anew a few times only"


def test_a_disk_file_is_put_back_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RowLog(SingleRowFile(str(tmp_path / METRICS)), METRICS)
    log.append([row(1, 1), row(3, 1)])

    def refuse(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(row_files.os, "replace", refuse)
    with pytest.raises(OSError, match="No space left"):
        log.insert(log.extents(), [row(2, 1)])
    assert [path.name for path in tmp_path.iterdir()] == [METRICS]
    assert list(log.rows()) == [row(1, 1), row(3, 1)]


class Flaky(object_model.RecordedObjects):
    """Loses answers, or requests, as often as `chance` says."""

    def __init__(self) -> None:
        super().__init__()
        self.chance: random.Random | None = None

    def _maybe(self, share: float) -> None:
        if self.chance is not None and self.chance.random() < share:
            raise OSError("the connection was lost")

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        """See fsspec."""
        self._maybe(0.15)
        super().pipe_file(path, value, mode, **kwargs)
        self._maybe(0.15)

    def rm_file(self, path: str) -> None:
        """See fsspec."""
        self._maybe(0.15)
        super().rm_file(path)
        self._maybe(0.15)

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """See fsspec."""
        self._maybe(0.05)
        return super().cat_file(path, *args, **kwargs)


@pytest.mark.parametrize("seed", range(10))
def test_whoever_is_refused_and_tries_again_writes_each_row_once(seed: int) -> None:
    fs, wanted = Flaky(), []
    log, fs.chance = log_on(fs), random.Random(seed)

    def until_done(change: Any, argument: Any) -> None:
        while True:
            try:
                return change(argument)
            except OSError:
                continue

    for step in range(1, 300):
        if step % 60 == 0:
            until_done(log.cut, step - 20)
            wanted = [r for r in wanted if r["step"] <= step - 20]
        wanted.append(
            row(step, 1) if not wanted or wanted[-1]["step"] == step - 1 else row(wanted[-1]["step"] + 1, 2)
        )
        until_done(log.append, wanted[-1:])
    fs.chance = None
    assert list(log.rows()) == wanted
    for _ in range(8):
        wanted.append(row(wanted[-1]["step"] + 1, 3))
        log.append(wanted[-1:])
    assert list(log_on(fs).rows()) == wanted


def test_parts_have_names_by_their_numbers() -> None:
    assert (Part(7, 7, 0).name, Part(0, 63, 0).name) == ("part-00000007", "part-00000000-00000063")
