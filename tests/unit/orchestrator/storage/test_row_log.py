"""Rows read from either end, cut and mended, on a disk and on an object store, however they were damaged."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.storage import row_files, row_log
from orchestrator.storage.row_line import METRICS, Row, encode
from orchestrator.storage.row_log import RowLog, gaps, steps_text
from orchestrator.storage.run_directory import RunDir

NAMES = itertools.count()


def row(step: int, attempt: int = 1) -> Row:
    return {"step": step, "attempt": attempt, "time": 1e9 + step, "step_seconds": 0.5, "loss": 1 / step}


def opened(uri: str) -> RowLog:
    run = RunDir(uri)
    run.create()
    return run.log(METRICS)


@pytest.fixture(params=["disk", "objects"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> RowLog:
    return opened(str(tmp_path) if request.param == "disk" else f"memory://{tmp_path}")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that some lines are longer than what is read at once, and parts are put together early."""
    monkeypatch.setattr(row_log, "BLOCK", 64)
    monkeypatch.setattr(row_files, "MERGED_BYTES", 4000)


def steps(rows: Any) -> list[int]:
    return [row["step"] for row in rows]


def test_rows_are_read_from_both_ends(log: RowLog) -> None:
    assert (list(log.rows()), list(log.newest()), log.last(), log.size()) == ([], [], None, 0)
    for first in range(1, 200, 7):
        log.append([row(n) for n in range(first, first + 7)])
    assert steps(log.rows()) == list(range(1, 204))
    assert steps(log.newest()) == list(range(203, 0, -1))
    assert (log.last() or {})["step"] == 203
    assert steps(log.after(150)) == list(range(151, 204))
    assert steps(log.after(-1)) == list(range(1, 204))
    assert [extent[2:] for extent in log.extents()] == [(1, 203)]
    placed = list(log.forward())
    assert placed == list(log.backward())[::-1]
    assert placed[-1].end == log.size()
    assert [line.row for line in log.forward(placed[100].start)] == [row(n) for n in range(101, 204)]
    assert [line.row for line in log.backward(placed[100].end)] == [row(n) for n in range(101, 0, -1)]


def test_a_cut_takes_away_what_is_behind_a_step(log: RowLog) -> None:
    for n in range(1, 101):
        log.append([row(n)])
    assert log.cut(90) == 90
    assert log.cut(95) == 90
    log.append([row(n, 2) for n in range(91, 94)])
    assert log.cut(92) == 92
    assert steps(log.rows()) == list(range(1, 93))
    assert [r["attempt"] for r in log.rows()][-3:] == [1, 2, 2]
    assert log.cut(0) == 0
    assert list(log.rows()) == []
    log.append([row(1)])
    assert steps(log.rows()) == [1]


def test_what_is_read_for_the_end_does_not_grow_with_the_file(
    log: RowLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By bytes read and lines parsed."""
    counted = {"bytes": 0, "lines": 0}
    for kind in (row_files.FileView, row_files.PartsView):
        plain = kind.read

        def read(view: Any, start: int, end: int, plain: Any = plain) -> bytes:
            data = plain(view, start, end)
            counted["bytes"] += len(data)
            return data

        monkeypatch.setattr(kind, "read", read)
    decode = row_log.decode
    monkeypatch.setattr(
        row_log,
        "decode",
        lambda line, name: [decode(line, name), counted.update(lines=counted["lines"] + 1)][0],
    )
    spent = []
    for first, last in ((1, 200), (201, 4000)):
        log.append([row(n) for n in range(first, last + 1)])
        counted.update(bytes=0, lines=0)
        assert steps(itertools.islice(log.newest(), 20)) == list(range(last, last - 20, -1))
        assert steps(log.after(last - 10)) == list(range(last - 9, last + 1))
        assert log.cut(last - 5) == last - 5
        log.append([row(n, 2) for n in range(last - 4, last + 1)])
        spent.append((counted["bytes"], counted["lines"]))
    assert spent[1][1] <= spent[0][1] + 10
    assert spent[1][0] <= 2 * spent[0][0]


def test_rows_that_were_found_again_come_into_their_places(log: RowLog) -> None:
    for first in (1, 21, 41, 61, 90):
        log.append([row(n) for n in range(first, first + 10)])
    extents = log.extents()
    missing = gaps(extents, 1, 105)
    assert missing == [(11, 20), (31, 40), (51, 60), (71, 89), (100, 105)]
    assert steps_text(missing) == "11 to 20, 31 to 40, 51 to 60, 71 to 89, 100 to 105"
    log.insert(extents, [row(n) for a, b in missing for n in range(a, b + 1) if n != 80])
    assert steps(log.rows()) == [n for n in range(1, 106) if n != 80]
    log.append([row(106)])
    assert gaps(log.extents(), 1, 106) == [(80, 80)]
    assert steps_text([(n, n) for n in range(7)]) == "0, 1, 2, 3, 4 and 2 more places"


def test_all_may_be_lost_and_found_again(log: RowLog) -> None:
    log.insert([], [row(2), row(1)])
    assert steps(log.rows()) == [1, 2]


damages = st.lists(
    st.tuples(
        st.sampled_from(["tear", "zero", "garbage", "flip", "drop", "double", "swap", "json", "newline"]),
        st.floats(0, 1), st.floats(0, 1),
    ),
    min_size=1, max_size=4,
)  # fmt: skip


def damaged(data: bytes, how: str, at: float, size: float) -> bytes:
    """The bytes of a file of rows after something went over it."""
    place = int(at * len(data))
    end = min(place + 1 + int(size * 300), len(data))
    lines = data.splitlines(keepends=True)
    line = min(int(at * len(lines)), len(lines) - 1)
    other = min(int(size * len(lines)), len(lines) - 1)
    if not lines:
        return data
    match how:
        case "tear":
            return data[:place]
        case "zero":
            return data[:place] + bytes(end - place) + data[end:]
        case "garbage":
            return data[:place] + random.Random(place).randbytes(end - place) + data[end:]
        case "flip":
            return (
                data[:place] + bytes([data[place] ^ 1 << end % 8]) + data[place + 1 :]
                if place < len(data)
                else data
            )
        case "drop":
            return b"".join(lines[:line] + lines[line + 1 + other // 4 :])
        case "double":
            return b"".join(lines[: line + 1] + lines[line:])
        case "swap":
            lines[line], lines[other] = lines[other], lines[line]
            return b"".join(lines)
        case "json":
            return b"".join([*lines[:line], b'[1, {"step": 3}]\n"x"\n{"step": "3"}\n', *lines[line:]])
    return data[:place] + b"\n" + data[place:]


@settings(max_examples=50, deadline=None)
@given(damage=damages, objects=st.booleans())
def test_whatever_was_done_to_a_file_each_step_is_there_once_or_missed(
    damage: list[tuple[str, float, float]], objects: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """And no row is another one than was written. What is missed is put back, and then nothing is."""
    folder = tmp_path_factory.mktemp("log")
    run = RunDir(f"memory://{folder}" if objects else str(folder))
    run.create()
    data = b"".join(encode(row(n)) for n in range(1, 41))
    for how, at, size in damage:
        data = damaged(data, how, at, size)
    if objects:
        third = len(data) // 3
        for number, part in enumerate((data[:third], data[third : 2 * third], data[2 * third :])):
            run.fs.pipe_file(f"{run.path}/{METRICS}/part-{number:08d}", part)
    else:
        (folder / METRICS).write_bytes(data)
    log = run.log(METRICS)
    counts = list(log.newest())
    assert steps(counts) == sorted(set(steps(counts)), reverse=True)
    assert all(found == row(found["step"]) for found in log.rows())
    missing = gaps(log.extents(), 1, 40)
    assert {n for a, b in missing for n in range(a, b + 1)} == set(range(1, 41)) - set(steps(counts))
    log.insert(log.extents(), [row(n) for a, b in missing for n in range(a, b + 1)])
    assert list(log.newest())[::-1] == [row(n) for n in range(1, 41)]
    assert gaps(log.extents(), 1, 40) == []
    log.append([row(41)])
    assert log.cut(39) == 39
    assert steps(log.newest()) == list(range(39, 0, -1))


def test_a_reader_elsewhere_sees_by_the_count_that_rows_were_taken_away(log: RowLog) -> None:
    log.append([row(n) for n in range(1, 9)])
    assert (log.cut(8), log.cuts) == (8, 0)
    assert (log.cut(3), log.cuts) == (3, 1)


def test_rows_of_a_version_before_are_read(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text("".join(json.dumps(row(n)) + "\n" for n in (1, 2, 3)))
    (tmp_path / "events.jsonl").touch()
    log = opened(str(tmp_path))
    assert list(log.rows()) == [row(1), row(2), row(3)]
    store = RunDir(f"memory://{tmp_path}/older")
    for number in range(100):
        part = f"{store.path}/{METRICS}/part-{number:08d}"
        store.fs.pipe_file(part, (json.dumps(row(number + 1)) + "\n").encode())
    assert steps(store.log(METRICS).rows()) == list(range(1, 101))
    for n in range(101, 131):
        store.log(METRICS).append([row(n)])
    assert steps(store.log(METRICS).rows()) == list(range(1, 131))
    assert len(store.fs.ls(f"{store.path}/{METRICS}")) < 25, (
        "its parts are put together, some at each writing"
    )
